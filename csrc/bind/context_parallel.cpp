#include "aserve/context_parallel.h"

#include <limits>
#include <vector>

#include "bind.h"

namespace aserve {
namespace {

constexpr int64_t cp_max = 65536;

struct Group {
  std::vector<int64_t> lengths;
  int64_t total = 0;
  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
};

Group group(const py::sequence& lengths) {
  Group made;
  made.lengths.reserve(lengths.size());
  for (const auto& item : lengths) {
    const int64_t length = item.cast<int64_t>();
    require(length >= 0, "a length is negative");
    require(length <= std::numeric_limits<int32_t>::max() - made.total,
            "a group has more rows than an int32 can count");
    made.total += length;
    made.lengths.push_back(length);
  }
  return made;
}

CpRank cp_rank(bool is_zigzag, int64_t cp, int64_t rank) {
  require(cp >= 1 && cp <= cp_max, "cp is outside [1, 65536]");
  require(rank >= 0 && rank < cp, "rank is outside [0, cp)");
  return {is_zigzag ? CpKind::zigzag : CpKind::interleave, cp, rank};
}

std::vector<int32_t> index_of(const CpRank& r, const Group& g) {
  const int64_t n = cp_index(r, g.lengths.data(), g.sequences(), nullptr);
  std::vector<int32_t> rows(static_cast<size_t>(n));
  cp_index(r, g.lengths.data(), g.sequences(), rows.data());
  return rows;
}

int64_t run_rows(bool is_zigzag, int64_t cp, int64_t rank, const py::sequence& lengths) {
  const Group g = group(lengths);
  return cp_index(cp_rank(is_zigzag, cp, rank), g.lengths.data(), g.sequences(), nullptr);
}

void run_index(bool is_zigzag, int64_t cp, int64_t rank, const py::sequence& lengths, Address out) {
  const Group g = group(lengths);
  cp_index(cp_rank(is_zigzag, cp, rank), g.lengths.data(), g.sequences(), at<int32_t>(out));
}

void run_counts(bool is_zigzag, int64_t cp, const py::sequence& lengths, Address out) {
  const Group g = group(lengths);
  const CpKind kind = cp_rank(is_zigzag, cp, 0).kind;
  cp_counts(kind, cp, g.lengths.data(), g.sequences(), at<int32_t>(out));
}

// x: (address, rows, stride and size of a row in bytes); share: (is_zigzag, cp, rank, lengths).
void run_split(Team& team, const py::tuple& x, const py::tuple& share, Address out) {
  const Group g = group(share[3].cast<py::sequence>());
  require(x[1].cast<int64_t>() == g.total, "x does not have the rows of the group");
  const CpRank r =
      cp_rank(share[0].cast<bool>(), share[1].cast<int64_t>(), share[2].cast<int64_t>());
  const std::vector<int32_t> rows = index_of(r, g);
  const int64_t n = static_cast<int64_t>(rows.size()), bytes = x[3].cast<int64_t>();
  const void* from = at<const void>(x[0].cast<Address>());
  const int64_t stride = x[2].cast<int64_t>();
  unlocked(n * bytes / 4,
           [&] { gather_rows(team, from, stride, bytes, rows.data(), n, at<void>(out)); });
}

// x as above; share: (is_zigzag, cp, lengths).
void run_join(Team& team, const py::tuple& x, const py::tuple& share, Address out) {
  const Group g = group(share[2].cast<py::sequence>());
  require(x[1].cast<int64_t>() == g.total, "x does not have the rows of the group");
  const int64_t cp = share[1].cast<int64_t>();
  CpRank r = cp_rank(share[0].cast<bool>(), cp, 0);
  std::vector<int32_t> rows(static_cast<size_t>(g.total));
  int32_t* to = rows.data();
  for (; r.rank < cp; ++r.rank) to += cp_index(r, g.lengths.data(), g.sequences(), to);
  const int64_t bytes = x[3].cast<int64_t>(), stride = x[2].cast<int64_t>();
  const void* from = at<const void>(x[0].cast<Address>());
  unlocked(g.total * bytes / 4,
           [&] { scatter_rows(team, from, stride, bytes, rows.data(), g.total, at<void>(out)); });
}

}  // namespace

void bind_context_parallel(py::module_& module) {
  module.def("cp_rows", &run_rows);
  module.def("cp_index", &run_index);
  module.def("cp_counts", &run_counts);
  module.def("cp_split", &run_split);
  module.def("cp_join", &run_join);
}

}  // namespace aserve
