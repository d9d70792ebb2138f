// Trees of drafted rows, for every processor; aserve/core/tree.py has the rules, aserve/tensor/tree.py
// the shapes. A tree's candidates, nodes and rows are numbered so that parents come before children.
#pragma once

#include <climits>
#include <cstdint>

#include "aserve/index.h"
#include "aserve/noise.h"
#include "aserve/team.h"
#include "aserve/threshold.h"

namespace aserve {

// Integers in the order of scores. NaN is before every number, so that it is never chosen first.
constexpr int32_t key_of_nan = INT32_MIN;
ASERVE_HD int32_t score_key(float score) {
  return score != score ? key_of_nan : static_cast<int32_t>(ordered(score));
}

// Of two candidates the better one is chosen first; of equals the one that was there first.
ASERVE_HD bool is_better(int32_t key, int64_t place, int32_t other_key, int64_t other_place) {
  return key > other_key || (key == other_key && place < other_place);
}

// A search for a key that `wanted` of n keys reach, or if there is none, as few more as can be: count
// how many reach `key()`, `tell` it, until it is over. Then it is `low`. All are in [low, high].
struct KeySearch {
  int32_t low, high;
  int64_t wanted, reach_low;  // n keys reach low
  int64_t reach_end = 0;      // those beyond high
  bool halves = false;

  ASERVE_HD bool is_over() const { return low >= high; }

  // Where it would be if keys lay evenly; every other time the middle, which is never far off.
  ASERVE_HD int32_t key() const {
    const int64_t width = static_cast<int64_t>(high) - low;
    int64_t step = (width + 1) / 2;
    if (!halves) {
      const float left = static_cast<float>(reach_low - wanted) + 0.5f;
      step = static_cast<int64_t>(left / static_cast<float>(reach_low - reach_end) *
                                  static_cast<float>(width));
      step = step < 1 ? 1 : step > width ? width : step;
    }
    return static_cast<int32_t>(low + step);
  }

  ASERVE_HD void tell(int32_t key, int64_t reach) {
    if (reach >= wanted) {
      low = key;
      reach_low = reach;
    }
    if (reach <= wanted) {
      high = reach == wanted ? key : key - 1;
      reach_end = reach;
    }
    halves = !halves;
  }
};

// Sets of rows as words of 64 bits.
ASERVE_HD int64_t words_for(int64_t rows) { return ceil_div(rows, 64); }
ASERVE_HD uint64_t bit_of(int64_t row) { return uint64_t(1) << (row & 63); }

// The same for places among candidates, in words of 32 bits.
struct Marks {
  const uint32_t* words;

  ASERVE_HD bool has(int64_t place) const { return words[place / 32] >> (place & 31) & 1; }
  // How many there are before a place.
  ASERVE_HD int64_t before(int64_t place) const {
    int64_t found = 0;
    for (int64_t word = 0; word < place / 32; ++word) found += bits_in(words[word]);
    return found + bits_in(words[place / 32] & ((1u << (place & 31)) - 1));
  }
  ASERVE_HD static int bits_in(uint32_t word) {
#if defined(__CUDA_ARCH__)
    return __popc(word);
#else
    return __builtin_popcount(word);
#endif
  }
};

// The row above a row, -1 at a root; and also where it is not before it, so that every walk ends.
ASERVE_HD int32_t row_above(const int32_t* parents, int32_t row) {
  return parents[row] < row ? parents[row] : -1;
}

// How deep a place of a tree is on a path down from its root, -1 if it is not on it. The places of a
// path ascend.
ASERVE_HD int32_t depth_on_path(const int32_t* path, int32_t length, int32_t place) {
  int32_t low = 0, high = length;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (path[middle] < place) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < length && path[low] == place ? low : -1;
}

// The path that the model's own draws keep of rows whose `parents` come before them (-1 at the root),
// from row 0 down: a row stays if the token drawn at its parent is its own, the first such child where
// drafts are equal. Returns the path's length; the token drawn at its last row comes next in the text.
// Row 0 is no draft and always stays. A row at which nothing could be drawn (-1) does not: its token
// is then the one that comes next.
ASERVE_HD int32_t accept_path(const int32_t* parents, const int32_t* tokens, const int32_t* drawn,
                              int32_t rows, int32_t* path) {
  if (rows == 0) return 0;
  int32_t length = 1, last = 0;
  path[0] = 0;
  for (int32_t row = 1; row < rows; ++row) {
    if (parents[row] != last || tokens[row] != drawn[last] || drawn[row] < 0) continue;
    last = row;
    path[length++] = row;
  }
  return length;
}

// The k likeliest tokens of each row and the log softmax of them, best first. A row without k finite
// logits goes on with tokens by place and -inf; one with NaN, +inf or nothing finite has only those, and
// NaN. The mass of a row is good to mass_error, which is enough for a draft.
struct TreeTop {
  const float* logits;  // [rows, vocab], `stride` apart
  float* logprobs;      // [rows, k]
  int32_t* tokens;
  int64_t stride, rows, vocab, k;
};
void top_tokens(Team& team, const TreeTop& call);

// The m likeliest tokens of each of n rows, put in the order in which the target's own noise would have
// them, and of those the first k: a token counts logprob / temperature + gumbel, and its score is the
// log softmax of that over the m. Below temperature_min a row has no noise and stays as it is.
struct TreeNoise {
  const float* logprobs;  // [n, m]
  const int32_t* tokens;
  const uint64_t* seeds;      // [n], as the next two
  const int32_t* positions;   // where the token will stand
  const float* temperatures;
  float* out_logprobs;  // [n, k]
  int32_t* out_tokens;
  int64_t n, m, k;
};
void under_noise(Team& team, const TreeNoise& call);

constexpr float temperature_min = 1e-5f;
// As is_better: NaN is after all numbers.
ASERVE_HD bool is_likelier(double score, int64_t place, double other, int64_t other_place) {
  if (score > other || score < other) return score > other;
  const bool is_number = score == score;
  return is_number != (other == other) ? is_number : place < other_place;
}
ASERVE_HD double noisy_score(float logprob, float temperature, uint64_t key, int32_t token) {
  const double noise = gumbel_noise(noise_bits(key, static_cast<uint32_t>(token)));
  return static_cast<double>(logprob) / temperature + noise;
}

// Candidates of n trees, `capacity` apart. A score is that of the whole path; a parent is the place of
// another candidate of the tree, -1 the root.
struct TreePool {
  float* scores;
  int32_t* tokens;
  int32_t* parents;
  int64_t capacity, n;
};

// The k likeliest children of each of a tree's `beams` nodes become its candidates from `begin` on, and
// the `width` best of them the nodes of the next level, best first.
struct TreeExpand {
  TreePool pool;
  const float* logprobs;        // [n, beams, k]
  const int32_t* top_tokens;    // [n, beams, k]
  const int32_t* beam;          // [n, beams], places; null: the root
  int32_t* places;              // [n, width], as the next
  int32_t* tokens;
  int32_t* rows;  // of [n * beams]: under which each is
  int64_t begin, beams, k, width;
};
void expand(Team& team, const TreeExpand& call);

// The start[i + 1] - start[i] best of tree i's first `count` candidates, in their order; at most all.
// None counts for more than its parent, so that it never comes without it.
struct TreeSelect {
  TreePool pool;
  const int32_t* start;  // [n + 1]
  int32_t* tokens;       // [start[n]], as the next
  int32_t* parents;      // among the tree's chosen, -1 the root
  float* scores;
  int64_t count;
};
// False where a parent is not before its child.
bool select(Team& team, const TreeSelect& call);

// Of rows of n trees, parents before children and -1 at a root: where each stands, which rows it sees,
// and its first child and next sibling, -1 where there is none.
struct TreeLayout {
  const int32_t* row_start;  // [n + 1]
  const int32_t* parents;    // [row_start[n]], as those that follow
  const int32_t* starts;     // [n], the positions of the roots
  int32_t* positions;
  int32_t* first_child;
  int32_t* next_sibling;
  uint64_t* mask;  // [rows, words]: bit of row's own path
  int64_t n, words;
};
bool lay_out(Team& team, const TreeLayout& call);

// The paths of all rows, one after the other, as attention takes them: that of row t is
// paths[path_start[t]] to paths[path_start[t + 1] - 1]. Empty where a tree is a chain. With `paths` null
// only path_start is written. False as above.
bool tree_paths(const int32_t* row_start, const int32_t* parents, int64_t n, int32_t* path_start,
                int32_t* paths);

// accept_path of n trees. Outputs are as long as the rows, and -1 behind a tree's path.
struct TreeAccept {
  const int32_t* row_start;  // [n + 1]
  const int32_t* parents;
  const int32_t* tokens;
  const int32_t* drawn;
  const int32_t* slots;  // of the rows' KV; may be null, as from_slots and to_slots then
  int32_t* path;
  int32_t* kept;        // the token drawn at each row of the path
  int32_t* lengths;     // [n], as next: the last of kept
  int32_t* next;
  int32_t* from_slots;  // which KV moves: -1 where none does
  int32_t* to_slots;
  int64_t n;
};
void accept(const TreeAccept& call);

}  // namespace aserve
