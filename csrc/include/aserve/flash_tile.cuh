// Where a tile of paged attention is in the work of a step, and where its sums of a split go.
#pragma once

#include "aserve/cuda.cuh"
#include "aserve/flash.cuh"
#include "aserve/thread_block.cuh"

namespace aserve {

// What a thread has of matrices: eight columns of sums in 16 rows, 16 columns of bfloat16 in 16 rows.
template <int N>
struct Sums {
  float v[N][4];
};
template <int N>
struct Halves {
  uint32_t v[N][4];
};
// Of its two rows.
struct RowPair {
  int32_t row[2];
};
struct Softs {
  Soft v[2];
};

// A tile's place in the work.
struct FlashTile {
  int64_t n, kv_head, group, row_begin;
  int32_t lane_begin, lanes;  // of the sequence's rows * group
  FlashSequence sequence;
  FlashRange range;

  ASERVE_DEVICE int32_t row_of(int32_t lane) const {
    return static_cast<int32_t>(quotient(lane_begin + lane, group));
  }
  ASERVE_DEVICE int64_t head_of(int32_t lane) const {
    const int64_t at = lane_begin + lane;
    return kv_head * group + at - quotient(at, group) * group;
  }
};

ASERVE_DEVICE FlashSequence sequence_at(const aserve_attend& call, int64_t n) {
  FlashSequence sequence = flash_sequence(call.positions, call.path_start, call.paths,
                                          call.row_start[n], call.row_start[n + 1]);
  sequence.kv_len = call.kv_len[n];
  sequence.window = call.window;
  return sequence;
}

// False where a number stands for no tile.
ASERVE_DEVICE bool find_tile(const aserve_pages& pages, const aserve_attend& call, int64_t tile,
                             int64_t kv_head, int64_t lanes_max, FlashTile& found) {
  found.group = quotient(call.heads, pages.heads);
  found.n = tile_sequence(call.row_start, call.sequences, found.group, lanes_max, tile);
  const int64_t first = tile - tile_start(call.row_start, found.n, found.group, lanes_max);
  found.row_begin = call.row_start[found.n];
  const int64_t all = (call.row_start[found.n + 1] - found.row_begin) * found.group;
  if (first < 0 || first * lanes_max >= all) return false;
  found.kv_head = kv_head;
  found.lane_begin = static_cast<int32_t>(first * lanes_max);
  const int64_t left = all - found.lane_begin;
  found.lanes = static_cast<int32_t>(left < lanes_max ? left : lanes_max);
  found.sequence = sequence_at(call, found.n);
  found.range = flash_range(found.sequence, found.row_of(0), found.row_of(found.lanes - 1));
  return true;
}

// A split's sums of one row and head among the partials: dim values, then max and sum.
ASERVE_DEVICE float* partial_at(const aserve_attend& call, int64_t dim, int64_t row, int64_t head,
                                int64_t split) {
  return call.partials + ((row * call.heads + head) * call.splits + split) * (dim + 2);
}

}  // namespace aserve
