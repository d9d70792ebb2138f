#include "aserve/tree.h"

#include <algorithm>
#include <vector>

#include "bind.h"

namespace aserve {
namespace {

constexpr char not_before[] = "a parent is not before its child";

// Where the parts of n trees begin: from 0 up, `total` in all.
const int32_t* offsets(Address address, int64_t n, int64_t total) {
  const int32_t* start = at<const int32_t>(address);
  require(start[0] == 0, "the first tree does not begin at 0");
  for (int64_t i = 0; i < n; ++i) require(start[i] <= start[i + 1], "a tree ends before it begins");
  require(start[n] == total, "trees have more or fewer rows than there are");
  return start;
}

// (scores, tokens, parents, capacity, n)
TreePool tree_pool(const py::tuple& pool) {
  require(pool.size() == 5, "a pool has five fields");
  return {at<float>(pool[0].cast<Address>()), at<int32_t>(pool[1].cast<Address>()),
          at<int32_t>(pool[2].cast<Address>()), pool[3].cast<int64_t>(), pool[4].cast<int64_t>()};
}

// logits: (address, stride, rows, vocab).
void run_top(Team& team, const py::tuple& logits, int64_t k, Address logprobs, Address tokens) {
  TreeTop c{};
  c.logits = at<const float>(logits[0].cast<Address>());
  c.stride = logits[1].cast<int64_t>();
  c.rows = logits[2].cast<int64_t>();
  c.vocab = logits[3].cast<int64_t>();
  c.k = k;
  require(k >= 1 && k <= c.vocab, "k is outside [1, vocabulary]");
  c.logprobs = at<float>(logprobs);
  c.tokens = at<int32_t>(tokens);
  unlocked(c.rows * c.vocab, [&] { top_tokens(team, c); });
}

// top: (logprobs, tokens, rows, m); noise: (seeds, positions, temperatures); out: (logprobs, tokens, k).
void run_noise(Team& team, const py::tuple& top, const py::tuple& noise, const py::tuple& out) {
  TreeNoise c{};
  c.logprobs = at<const float>(top[0].cast<Address>());
  c.tokens = at<const int32_t>(top[1].cast<Address>());
  c.n = top[2].cast<int64_t>();
  c.m = top[3].cast<int64_t>();
  c.seeds = at<const uint64_t>(noise[0].cast<Address>());
  c.positions = at<const int32_t>(noise[1].cast<Address>());
  c.temperatures = at<const float>(noise[2].cast<Address>());
  c.out_logprobs = at<float>(out[0].cast<Address>());
  c.out_tokens = at<int32_t>(out[1].cast<Address>());
  c.k = out[2].cast<int64_t>();
  require(c.k >= 1 && c.k <= c.m, "k is outside [1, tokens of a row]");
  unlocked(c.n * c.m * 16, [&] { under_noise(team, c); });
}

// top: (logprobs, tokens, beams, k, beam or 0); out: (places, tokens, rows, width).
void run_expand(Team& team, const py::tuple& pool, int64_t begin, const py::tuple& top,
                const py::tuple& out) {
  TreeExpand c{};
  c.pool = tree_pool(pool);
  c.begin = begin;
  c.logprobs = at<const float>(top[0].cast<Address>());
  c.top_tokens = at<const int32_t>(top[1].cast<Address>());
  c.beams = top[2].cast<int64_t>();
  c.k = top[3].cast<int64_t>();
  c.beam = at<const int32_t>(top[4].cast<Address>());
  c.places = at<int32_t>(out[0].cast<Address>());
  c.tokens = at<int32_t>(out[1].cast<Address>());
  c.rows = at<int32_t>(out[2].cast<Address>());
  c.width = out[3].cast<int64_t>();
  require(begin >= 0 && c.beams >= 1 && c.k >= 1 && c.beams * c.k <= c.pool.capacity - begin,
          "a pool is full");
  require(c.width >= 1 && c.width <= c.beams * c.k, "width is outside [1, beams * k]");
  if (c.beam != nullptr) require_range(c.beam, c.pool.n * c.beams, begin, "candidate");
  unlocked(c.pool.n * c.beams * c.k, [&] { expand(team, c); });
}

// out: (tokens, parents, scores), as long as the last of `starts`.
void run_select(Team& team, const py::tuple& pool, int64_t count, const py::tuple& starts,
                const py::tuple& out) {
  TreeSelect c{};
  c.pool = tree_pool(pool);
  c.count = count;
  require(count >= 0 && count <= c.pool.capacity, "a pool has fewer candidates");
  require(static_cast<int64_t>(starts.size()) == c.pool.n + 1, "starts are not those of the trees");
  std::vector<int32_t> start;
  start.reserve(starts.size());
  for (const auto& item : starts) start.push_back(item.cast<int32_t>());
  require(start[0] == 0, "the first tree does not begin at 0");
  for (int64_t i = 0; i < c.pool.n; ++i) {
    const int64_t wanted = start[i + 1] - start[i];
    require(wanted >= 0 && wanted <= count, "a tree has fewer candidates");
  }
  c.start = start.data();
  c.tokens = at<int32_t>(out[0].cast<Address>());
  c.parents = at<int32_t>(out[1].cast<Address>());
  c.scores = at<float>(out[2].cast<Address>());
  bool good = true;
  unlocked(c.pool.n * count, [&] { good = select(team, c); });
  require(good, not_before);
}

// Of the mask of these rows; at least 1.
int64_t run_words(const py::tuple& rows) {
  const int64_t n = rows[1].cast<int64_t>();
  const int32_t* row_start = offsets(rows[0].cast<Address>(), n, rows[3].cast<int64_t>());
  int64_t words = 1;
  for (int64_t i = 0; i < n; ++i) {
    words = std::max(words, words_for(row_start[i + 1] - row_start[i]));
  }
  return words;
}

// rows: (row_start, n, parents, rows); out: (starts, words, positions, first_child, next_sibling, mask).
void run_lay_out(Team& team, const py::tuple& rows, const py::tuple& out) {
  TreeLayout c{};
  c.n = rows[1].cast<int64_t>();
  const int64_t total = rows[3].cast<int64_t>();
  c.row_start = offsets(rows[0].cast<Address>(), c.n, total);
  c.parents = at<const int32_t>(rows[2].cast<Address>());
  c.starts = at<const int32_t>(out[0].cast<Address>());
  c.words = out[1].cast<int64_t>();
  c.positions = at<int32_t>(out[2].cast<Address>());
  c.first_child = at<int32_t>(out[3].cast<Address>());
  c.next_sibling = at<int32_t>(out[4].cast<Address>());
  c.mask = at<uint64_t>(out[5].cast<Address>());
  require(c.words >= run_words(rows), "a tree has more rows than bits");
  bool good = true;
  unlocked(total * (3 + c.words), [&] { good = lay_out(team, c); });
  require(good, not_before);
}

// path_start has rows + 1 entries; with paths 0 it is written, and the paths' length returned.
int64_t run_paths(const py::tuple& rows, Address path_start, Address paths) {
  const int64_t n = rows[1].cast<int64_t>(), total = rows[3].cast<int64_t>();
  const int32_t* row_start = offsets(rows[0].cast<Address>(), n, total);
  int32_t* start = at<int32_t>(path_start);
  require(tree_paths(row_start, at<const int32_t>(rows[2].cast<Address>()), n, start,
                     at<int32_t>(paths)),
          not_before);
  return start[total];
}

// given: (tokens, drawn, slots or 0); out: (path, kept, lengths, next, from_slots, to_slots).
void run_accept(const py::tuple& rows, const py::tuple& given, const py::tuple& out) {
  TreeAccept c{};
  c.n = rows[1].cast<int64_t>();
  c.row_start = offsets(rows[0].cast<Address>(), c.n, rows[3].cast<int64_t>());
  c.parents = at<const int32_t>(rows[2].cast<Address>());
  c.tokens = at<const int32_t>(given[0].cast<Address>());
  c.drawn = at<const int32_t>(given[1].cast<Address>());
  c.slots = at<const int32_t>(given[2].cast<Address>());
  c.path = at<int32_t>(out[0].cast<Address>());
  c.kept = at<int32_t>(out[1].cast<Address>());
  c.lengths = at<int32_t>(out[2].cast<Address>());
  c.next = at<int32_t>(out[3].cast<Address>());
  c.from_slots = at<int32_t>(out[4].cast<Address>());
  c.to_slots = at<int32_t>(out[5].cast<Address>());
  accept(c);
}

}  // namespace

void bind_tree(py::module_& module) {
  module.def("tree_top", &run_top);
  module.def("tree_noise", &run_noise);
  module.def("tree_expand", &run_expand);
  module.def("tree_select", &run_select);
  module.def("tree_words", &run_words);
  module.def("tree_lay_out", &run_lay_out);
  module.def("tree_paths", &run_paths);
  module.def("tree_accept", &run_accept);
}

}  // namespace aserve
