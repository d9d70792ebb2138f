#include "aserve/tree.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "aserve/cpu.h"
#include "tree_kernels.h"

namespace aserve {
namespace {

// Candidates and rows below which another thread may cost more than it saves.
constexpr int64_t elements_task = 16384;

template <class Work>
void share_trees(Team& team, int64_t trees, int64_t elements, const Work& work) {
  const int64_t pieces = std::max<int64_t>(1, trees * elements / elements_task);
  const int64_t step = ceil_div(std::max<int64_t>(1, trees), pieces);
  team.run(ceil_div(trees, step), [&](int64_t i) {
    for (int64_t tree = i * step; tree < std::min(trees, (i + 1) * step); ++tree) work(tree);
  });
}

struct Candidate {
  int32_t key;
  int64_t place;
};

// Writes the places of the `width` best of n scores, best first.
void best_places(const float* scores, int64_t n, int64_t width, Candidate* best) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = score_key(scores[i]);
    if (found == width && key <= best[found - 1].key) continue;
    int64_t at = found < width ? found++ : found - 1;
    // Those before it came first: it passes only those that are worse.
    for (; at > 0 && best[at - 1].key < key; --at) best[at] = best[at - 1];
    best[at] = {key, i};
  }
}

void expand_tree(const TreeExpand& c, int64_t tree, Candidate* best) {
  const int64_t children = c.beams * c.k, row = tree * c.pool.capacity, top = tree * children;
  const int32_t* beam = c.beam == nullptr ? nullptr : c.beam + tree * c.beams;
  float* scores = c.pool.scores + row + c.begin;
  int32_t* tokens = c.pool.tokens + row + c.begin;
  int32_t* parents = c.pool.parents + row + c.begin;
  for (int64_t i = 0, b = 0; b < c.beams; ++b) {
    const int32_t parent = beam == nullptr ? -1 : beam[b];
    const float before = parent < 0 ? 0.0f : c.pool.scores[row + parent];
    for (int64_t j = 0; j < c.k; ++j, ++i) {
      scores[i] = before + c.logprobs[top + i];
      tokens[i] = c.top_tokens[top + i];
      parents[i] = parent;
    }
  }
  best_places(scores, children, c.width, best);
  for (int64_t i = 0; i < c.width; ++i) {
    const int64_t to = tree * c.width + i, place = best[i].place;
    c.places[to] = static_cast<int32_t>(c.begin + place);
    c.tokens[to] = tokens[place];
    c.rows[to] = static_cast<int32_t>(tree * c.beams + place / c.k);
  }
}

// NaN has the order it came in, behind all numbers.
void rerank_row(const TreeNoise& c, int64_t row, std::vector<double>& scores,
                std::vector<int32_t>& order) {
  const float *logprobs = c.logprobs + row * c.m, temperature = c.temperatures[row];
  const int32_t* tokens = c.tokens + row * c.m;
  float* out_logprobs = c.out_logprobs + row * c.k;
  int32_t* out_tokens = c.out_tokens + row * c.k;
  if (!(temperature >= temperature_min)) {
    std::copy_n(logprobs, c.k, out_logprobs);
    std::copy_n(tokens, c.k, out_tokens);
    return;
  }
  const uint64_t key = draw_key(c.seeds[row], static_cast<uint64_t>(c.positions[row]));
  double most = -HUGE_VAL, total = 0;
  for (int64_t i = 0; i < c.m; ++i) {
    scores[i] = noisy_score(logprobs[i], temperature, key, tokens[i]);
    order[i] = static_cast<int32_t>(i);
    if (scores[i] > most) most = scores[i];
  }
  for (int64_t i = 0; i < c.m; ++i) total += std::exp(scores[i] - most);
  std::partial_sort(order.begin(), order.begin() + c.k, order.begin() + c.m,
                    [&](int32_t a, int32_t b) { return is_likelier(scores[a], a, scores[b], b); });
  for (int64_t i = 0; i < c.k; ++i) {
    out_logprobs[i] = static_cast<float>(scores[order[i]] - most - std::log(total));
    out_tokens[i] = tokens[order[i]];
  }
}

const TreeKernels& kernels_in_force() {
#if defined(__x86_64__)
  if (level() >= Level::avx512) return tree_avx512;
#endif
  return tree_generic;
}

// Room for one tree: its candidates' keys, where those are that may be chosen, and their numbers.
struct Space {
  std::vector<int32_t> keys, places, numbers;

  void fit(int64_t count) {
    if (static_cast<int64_t>(keys.size()) >= count) return;
    keys.resize(static_cast<size_t>(count));
    places.resize(static_cast<size_t>(count) + 16);
    numbers.resize(static_cast<size_t>(count));
  }
};

bool select_tree(const TreeSelect& c, int64_t tree, const TreeKernels& kernels, Space& space) {
  const int64_t row = tree * c.pool.capacity, count = c.count;
  const int64_t to = c.start[tree], wanted = c.start[tree + 1] - to;
  const float* scores = c.pool.scores + row;
  const int32_t *tokens = c.pool.tokens + row, *parents = c.pool.parents + row;
  int32_t *keys = space.keys.data(), *places = space.places.data();
  int32_t* numbers = space.numbers.data();
  if (!kernels.path_keys(scores, parents, count, keys)) return false;
  if (wanted == 0) return true;
  int32_t least = key_of_nan;
  if (wanted < count) {
    const KeyRange all = kernels.range(keys, count);
    KeySearch search = {all.low, all.high, wanted, count};
    while (!search.is_over()) {
      const int32_t key = search.key();
      search.tell(key, kernels.count(keys, count, key));
    }
    least = search.low;
  }
  const int64_t reached = kernels.gather(keys, count, least, places);
  int64_t spare = reached - wanted;  // the last of those that just reach it are not chosen
  for (int64_t i = reached - 1; spare > 0; --i) {
    if (keys[places[i]] != least) continue;
    places[i] = -1;
    --spare;
  }
  int64_t at = to;
  for (int64_t i = 0; i < reached; ++i) {
    const int32_t place = places[i];
    if (place < 0) continue;
    numbers[place] = static_cast<int32_t>(at - to);
    c.tokens[at] = tokens[place];
    c.parents[at] = parents[place] < 0 ? -1 : numbers[parents[place]];
    c.scores[at++] = scores[place];
  }
  return true;
}

// Each row's path is its parent's and the row. Nearly every tree has a word of rows.
void mark_paths(const int32_t* parents, int64_t rows, int64_t words, uint64_t* mask) {
  if (words == 1) {
    for (int64_t row = 0; row < rows; ++row) {
      mask[row] = bit_of(row) | (parents[row] < 0 ? 0 : mask[parents[row]]);
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row, mask += words) {
    if (parents[row] < 0) {
      std::fill_n(mask, words, uint64_t(0));
    } else {
      std::copy_n(mask - (row - parents[row]) * words, words, mask);
    }
    mask[row / 64] |= bit_of(row);
  }
}

bool lay_out_tree(const TreeLayout& c, int64_t tree) {
  const int64_t begin = c.row_start[tree], rows = c.row_start[tree + 1] - begin;
  const int32_t start = c.starts[tree], *parents = c.parents + begin;
  int32_t* positions = c.positions + begin;
  int32_t* first_child = c.first_child + begin;
  int32_t* next_sibling = c.next_sibling + begin;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t parent = parents[row];
    if (parent < -1 || parent >= row) return false;
    positions[row] = parent < 0 ? start : positions[parent] + 1;
  }
  mark_paths(parents, rows, c.words, c.mask + begin * c.words);
  std::fill_n(first_child, rows, -1);
  for (int64_t row = rows - 1; row >= 0; --row) {
    const int64_t parent = parents[row];
    next_sibling[row] = parent < 0 ? -1 : first_child[parent];
    if (parent >= 0) first_child[parent] = static_cast<int32_t>(row);
  }
  return true;
}

bool is_chain(const int32_t* parents, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    if (parents[row] != row - 1) return false;
  }
  return true;
}

}  // namespace

void expand(Team& team, const TreeExpand& call) {
  share_trees(team, call.pool.n, call.beams * call.k, [&](int64_t tree) {
    static thread_local std::vector<Candidate> best;
    if (static_cast<int64_t>(best.size()) < call.width) best.resize(static_cast<size_t>(call.width));
    expand_tree(call, tree, best.data());
  });
}

void under_noise(Team& team, const TreeNoise& call) {
  constexpr int64_t candidate_cost = 16;  // of two logarithms, beside what other passes do
  share_trees(team, call.n, call.m * candidate_cost, [&](int64_t row) {
    static thread_local std::vector<double> scores;
    static thread_local std::vector<int32_t> order;
    if (static_cast<int64_t>(scores.size()) < call.m) {
      scores.resize(static_cast<size_t>(call.m));
      order.resize(static_cast<size_t>(call.m));
    }
    rerank_row(call, row, scores, order);
  });
}

bool select(Team& team, const TreeSelect& call) {
  const TreeKernels& kernels = kernels_in_force();
  std::atomic<bool> good{true};
  share_trees(team, call.pool.n, call.count, [&](int64_t tree) {
    static thread_local Space space;
    space.fit(call.count);
    if (!select_tree(call, tree, kernels, space)) good = false;
  });
  return good;
}

bool lay_out(Team& team, const TreeLayout& call) {
  std::atomic<bool> good{true};
  const int64_t rows = call.n > 0 ? call.row_start[call.n] / call.n : 0;
  share_trees(team, call.n, rows * (3 + call.words), [&](int64_t tree) {
    if (!lay_out_tree(call, tree)) good = false;
  });
  return good;
}

bool tree_paths(const int32_t* row_start, const int32_t* parents, int64_t n, int32_t* path_start,
                int32_t* paths) {
  int32_t at = 0;
  for (int64_t tree = 0; tree < n; ++tree) {
    const int64_t begin = row_start[tree], rows = row_start[tree + 1] - begin;
    const int32_t* own = parents + begin;
    const bool chain = is_chain(own, rows);
    int32_t* start = path_start + begin;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t parent = own[row];
      if (parent < -1 || parent >= row) return false;
      start[row] = at;
      if (chain) continue;
      const int32_t above = parent < 0 ? 0 : start[parent + 1] - start[parent];
      if (paths != nullptr) {
        if (above > 0) std::copy_n(paths + start[parent], above, paths + at);
        paths[at + above] = static_cast<int32_t>(row);
      }
      at += above + 1;
    }
  }
  path_start[n > 0 ? row_start[n] : 0] = at;
  return true;
}

void accept(const TreeAccept& c) {
  for (int64_t tree = 0; tree < c.n; ++tree) {
    const int64_t begin = c.row_start[tree];
    const int32_t rows = c.row_start[tree + 1] - c.row_start[tree];
    const int32_t* drawn = c.drawn + begin;
    int32_t* path = c.path + begin;
    const int32_t length =
        accept_path(c.parents + begin, c.tokens + begin, drawn, rows, path);
    std::fill(path + length, path + rows, -1);
    int32_t* kept = c.kept + begin;
    for (int32_t i = 0; i < rows; ++i) kept[i] = i < length ? drawn[path[i]] : -1;
    c.lengths[tree] = length;
    c.next[tree] = length > 0 ? kept[length - 1] : -1;
    if (c.slots == nullptr) continue;
    const int32_t* slots = c.slots + begin;
    for (int32_t i = 0; i < rows; ++i) {
      const bool moves = i < length && path[i] != i;
      c.from_slots[begin + i] = moves ? slots[path[i]] : -1;
      c.to_slots[begin + i] = moves ? slots[i] : -1;
    }
  }
}

}  // namespace aserve
