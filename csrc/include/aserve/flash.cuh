// Index arithmetic of paged attention on tensor cores, and the softmax sums that are added split by
// split. A tile is 16 lanes a warp; a lane is a (row, head of the group of a KV head) pair of one
// sequence, row after row.
#pragma once

#include <cmath>
#include <cstdint>

#include "aserve/index.h"
#include "aserve/tree.h"

namespace aserve {

constexpr int64_t flash_split = 256;  // keys of a split

// Tiles are numbered over all sequences with a few numbers left out, so that the sequence of a tile
// is found by halving: sequence n has tiles tile_start(n), ..., and more numbers than tiles.
ASERVE_HD int64_t tile_start(const int32_t* row_start, int64_t n, int64_t group, int64_t lanes) {
  return row_start[n] * group / lanes + n;
}

// The last sequence whose tiles start at or before `tile`.
ASERVE_HD int64_t tile_sequence(const int32_t* row_start, int64_t sequences, int64_t group,
                                int64_t lanes, int64_t tile) {
  int64_t low = 0, high = sequences;  // the answer is in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (tile_start(row_start, middle, group, lanes) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// What a sequence's rows are: a chunk, each row at its position, or a tree behind all other keys.
struct FlashSequence {
  const int32_t* positions;   // of its rows
  const int32_t* path_start;  // of its rows, into `paths`; null: no tree
  const int32_t* paths;
  int64_t tree_start;  // the first key of the tree
  int64_t kv_len;
  int64_t window;  // 0: all keys
};

// Of the sequence with rows [begin, end), given what all rows have; path_start may be null.
ASERVE_HD FlashSequence flash_sequence(const int32_t* positions, const int32_t* path_start,
                                       const int32_t* paths, int64_t begin, int64_t end) {
  FlashSequence s = {positions + begin, nullptr, paths, 0, 0, 0};
  if (path_start == nullptr || begin == end) return s;
  const int32_t length = path_start[begin + 1] - path_start[begin];
  if (length == 0) return s;
  s.path_start = path_start + begin;
  s.tree_start = positions[begin] + 1 - length;
  return s;
}

ASERVE_HD bool is_visible(const FlashSequence& s, int32_t row, int64_t key) {
  int64_t position = key;
  if (s.path_start == nullptr) {
    if (key > s.positions[row]) return false;
  } else if (key >= s.tree_start) {
    const int32_t first = s.path_start[row], place = static_cast<int32_t>(key - s.tree_start);
    const int32_t depth = depth_on_path(s.paths + first, s.path_start[row + 1] - first, place);
    if (depth < 0) return false;
    position = s.tree_start + depth;
  }
  return s.window == 0 || position > s.positions[row] - s.window;
}

// No row in [first, last] sees a key outside [begin, end), and every one of them sees all keys of
// [begin_all, end_all), if that is a range.
struct FlashRange {
  int64_t begin, end, begin_all, end_all;
};

ASERVE_HD FlashRange flash_range(const FlashSequence& s, int32_t first, int32_t last) {
  FlashRange range;
  // Positions ascend, but not in a tree: there the root has the least, and no row the kv_len-th.
  const bool tree = s.path_start != nullptr;
  const int64_t lowest = tree ? s.tree_start : s.positions[first];
  const int64_t highest = tree ? s.kv_len - 1 : s.positions[last];
  range.begin = s.window == 0 || lowest < s.window ? 0 : lowest - s.window + 1;
  range.end = highest + 1;
  range.end_all = tree ? s.tree_start : lowest + 1;
  range.begin_all = s.window == 0 || highest < s.window ? 0 : highest - s.window + 1;
  return range;
}

// Where 16-byte piece `piece` of row `row` is in a tile of shared memory with `pieces` (a multiple of
// 8) to a row, in pieces: eight rows read at one piece, or one row at eight, touch all banks once.
ASERVE_HD int32_t swizzled(int32_t row, int32_t piece, int32_t pieces) {
  return row * pieces + (piece ^ (row & 7));
}

// A softmax so far: weights are exp2(score - max), of which `sum` is the sum. Nothing yet: -inf, 0.
struct Soft {
  float max, sum;
};

// What scales the two sides when a split's sums are added to those of the splits before it.
struct SoftScales {
  float before, after;
};

ASERVE_HD float finite(float max) { return max == -INFINITY ? 0.0f : max; }

ASERVE_HD SoftScales soften(Soft& total, const Soft& part) {
  const float max = part.max > total.max ? part.max : total.max;
  const SoftScales scales = {exp2f(total.max - finite(max)), exp2f(part.max - finite(max))};
  total.sum = fmaf(part.sum, scales.after, total.sum * scales.before);
  total.max = max;
  return scales;
}

ASERVE_HD float add_scaled(float total, float part, const SoftScales& scales) {
  return fmaf(part, scales.after, total * scales.before);
}

// What the sums are divided by at the end; a sink is one more key without a value.
ASERVE_HD float soft_factor(Soft total, const float* sink) {
  if (sink == nullptr) return total.sum > 0 ? 1.0f / total.sum : 0.0f;
  const SoftScales scales = soften(total, {*sink * 1.44269504f, 1.0f});
  return scales.before / total.sum;
}

}  // namespace aserve
