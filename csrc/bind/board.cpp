#include "aserve/board.h"

#include <pybind11/stl.h>

#include "bind.h"

namespace aserve {
namespace {

std::vector<int64_t> numbers(const py::tuple& values) {
  std::vector<int64_t> found(values.size());
  for (size_t i = 0; i < found.size(); ++i) found[i] = values[i].cast<int64_t>();
  return found;
}

// The words of a call, checked against what a half can hold.
struct Called {
  std::vector<int64_t> at;
  int agreed;

  Called(const py::tuple& agreed_words, const py::tuple& own_words, int ranks)
      : at(numbers(agreed_words)), agreed(static_cast<int>(at.size())) {
    for (const int64_t word : numbers(own_words)) at.push_back(word);
    const auto words_max = static_cast<size_t>(Board::words_max(ranks));
    require(at.size() <= words_max, "a call of too many words");
  }
  Words words() const { return {at.data(), static_cast<int>(at.size()), agreed}; }
};

class PyBoard {
 public:
  PyBoard(int file, int ranks, int rank, int64_t half_bytes, double limit_s)
      : board_(file, checked(ranks, rank, half_bytes), rank, half_bytes,
               static_cast<int64_t>(limit_s * 1e9)),
        ranks_(ranks),
        half_bytes_(half_bytes) {}

  static int64_t bytes(int ranks, int64_t half_bytes) {
    require(ranks >= 2 && ranks <= ranks_max, "a board has 2 to 4096 ranks");
    require(half_bytes >= 64 && half_bytes <= int64_t{1} << 32, "a half has 64 bytes to 4 GiB");
    return Board::bytes(ranks, half_bytes);
  }

  int open_group(int index, const py::tuple& members) {
    std::vector<int> ranks;
    for (const int64_t rank : numbers(members)) {
      require(rank >= 0 && rank < ranks_, "a member is not of this board");
      ranks.push_back(static_cast<int>(rank));
    }
    require(index >= 0 && index < board_groups, "too many groups");
    require(ranks.size() >= 2, "a group has two ranks or more");
    sizes_.push_back(ranks.size());
    return board_.open_group(index, std::move(ranks));
  }

  Met reduce(int group, const Called& call, Address parts, int64_t blocks, int64_t n, int64_t from,
             int64_t to, Address out, bool is_double) {
    members(group);
    require(blocks >= 1 && blocks * (is_double ? 8 : 4) <= half_bytes_, "blocks exceed a half");
    require(n >= 0 && from >= 0 && to <= n, "a range outside the tensor");
    const Reduction made{at<const char>(parts), blocks, n, from, to, at<char>(out), is_double};
    py::gil_scoped_release release;
    return board_.reduce(group, call.words(), made);
  }

  Met gather(int group, const Called& call, Address x, const py::tuple& sizes, Address out) {
    const std::vector<int64_t> bytes = by_place(group, sizes);
    py::gil_scoped_release release;
    return board_.gather(group, call.words(), at<const char>(x), bytes.data(), at<char>(out));
  }

  Met exchange(int group, const Called& call, Address x, const py::tuple& sends,
               const py::tuple& receives, Address out) {
    const std::vector<int64_t> give = by_place(group, sends), get = by_place(group, receives);
    py::gil_scoped_release release;
    return board_.exchange(group, call.words(), at<const char>(x), {give.data(), get.data()},
                           at<char>(out));
  }

  // (agreed words, own words, whether the rank is still in the call), or None.
  py::object last(int rank) const {
    require(rank >= 0 && rank < ranks_, "no such rank");
    int agreed = 0;
    bool waiting = false;
    const std::vector<int64_t> words = board_.last(rank, &agreed, &waiting);
    if (words.empty() || agreed > static_cast<int>(words.size())) return py::none();
    const std::vector<int64_t> first(words.begin(), words.begin() + agreed);
    const std::vector<int64_t> rest(words.begin() + agreed, words.end());
    return py::make_tuple(first, rest, waiting);
  }

  Board board_;

 private:
  static constexpr int ranks_max = 4096;

  static int checked(int ranks, int rank, int64_t half_bytes) {
    bytes(ranks, half_bytes);
    require(rank >= 0 && rank < ranks, "no such rank");
    return ranks;
  }

  size_t members(int group) const {
    require(group >= 0 && group < static_cast<int>(sizes_.size()), "no such group");
    return sizes_[static_cast<size_t>(group)];
  }

  std::vector<int64_t> by_place(int group, const py::tuple& sizes) const {
    std::vector<int64_t> bytes = numbers(sizes);
    require(bytes.size() == members(group), "sizes of other ranks than the group's");
    for (const int64_t size : bytes) require(size >= 0, "a size is at least 0");
    return bytes;
  }

  int ranks_;
  int64_t half_bytes_;
  std::vector<size_t> sizes_;
};

}  // namespace

void bind_board(py::module_& module) {
  py::enum_<Met>(module, "Met")
      .value("ok", Met::ok)
      .value("broken", Met::broken)
      .value("timeout", Met::timeout)
      .value("mismatch", Met::mismatch);
  py::class_<Called>(module, "Called")
      .def(py::init<const py::tuple&, const py::tuple&, int>());
  py::class_<PyBoard>(module, "Board")
      .def(py::init<int, int, int, int64_t, double>())
      .def_static("bytes", &PyBoard::bytes)
      .def_property_readonly_static("text_bytes_max", [](const py::object&) { return board_text; })
      .def_property_readonly("attached", [](const PyBoard& b) { return b.board_.attached(); })
      .def_property_readonly("peers", [](const PyBoard& b) { return b.board_.peers(); })
      .def("open_group", &PyBoard::open_group)
      .def("reduce", &PyBoard::reduce)
      .def("gather", &PyBoard::gather)
      .def("exchange", &PyBoard::exchange)
      .def("last", &PyBoard::last)
      .def("fail", [](PyBoard& b, const py::bytes& text) { b.board_.fail(text); })
      .def("failure", [](const PyBoard& b) { return py::bytes(b.board_.failure()); });
}

}  // namespace aserve
