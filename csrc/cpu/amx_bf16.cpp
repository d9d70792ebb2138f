// bfloat16 weights on AMX tiles. Each output is one accumulator that takes k in order, 32 at a time,
// whatever rows share its tile; a tile has as many rows as there are, so one row costs one row's time.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"
#include "amx_linear.h"

namespace aserve {
namespace {

struct Shape {
  const AmxTask* task;
  const Weight* w;
  int64_t part_tiles;  // of a row block
};

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1);
}

// Adds a stored tile to the output: the first row block sets, later ones add, the last adds the bias.
static void settle(const Shape& s, const float* tile, float* out, int64_t rows, int64_t column,
                   int64_t part) {
  const Weight& w = *s.w;
  const __mmask16 mask = first(s.task->columns - column);
  const bool last = part + 1 == w.row_blocks && w.bias != nullptr;
  const float* from = w.bias + s.task->panel_begin * 16 + column;
  const __m512 bias = last ? _mm512_maskz_loadu_ps(mask, from) : _mm512_setzero_ps();
  for (int64_t r = 0; r < rows; ++r) {
    float* to = out + r * s.task->out_step;
    __m512 value = _mm512_load_ps(tile + r * 16);
    if (part > 0) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), value);
    if (last) value = _mm512_add_ps(value, bias);
    _mm512_mask_storeu_ps(to, mask, value);
  }
}

// Row blocks kept apart: the first n columns of a stored tile.
static void keep(const float* tile, int64_t rows, int64_t n, float* to, int64_t step) {
  const __mmask16 mask = first(n);
  for (int64_t r = 0; r < rows; ++r) {
    _mm512_mask_storeu_ps(to + r * step, mask, _mm512_load_ps(tile + r * 16));
  }
}

// `apart` is known to the compiler all the way up: asked for here it cost a narrow linear 7%.
template <int T, bool apart>
static inline void put(const Shape& s, int64_t row, int64_t rows, int64_t column, int64_t part) {
  const Weight& w = *s.w;
  const bool as_is = apart || (w.row_blocks == 1 && w.bias == nullptr);
  const AmxTask& task = *s.task;
  float* out = task.out + row * task.out_step + column;
  if (apart) out += part * task.part_step;
  if (as_is && column + 16 <= task.columns) {
    tile_store<T>(out, task.out_step * 4);
    return;
  }
  alignas(64) float tile[256];
  tile_store<T>(tile, 64);
  if (apart) {
    keep(tile, rows, task.columns - column, out, task.out_step);
  } else {
    settle(s, tile, out, rows, column, part);
  }
}

// Two tiles of rows by two blocks of the weight; without the second of either where there is none.
template <bool apart, bool rows2, bool blocks2>
static void square(const Shape& s, int64_t row_tile, int64_t block) {
  const AmxTask& task = *s.task;
  const int64_t row = (row_tile - task.row_begin) * 16, column = (block - task.panel_begin) * 16;
  const int64_t rows_0 = task.rows.rows_of(row_tile), rows_1 = task.rows.m - row_tile * 16 - 16;
  const char* a0 = task.rows.row_tile(row_tile);
  const char* a1 = rows2 ? task.rows.row_tile(row_tile + 1) : a0;
  const char* b0 = s.w->panel(block);
  const char* b1 = blocks2 ? s.w->panel(block + 1) : b0;
  for (int64_t part = 0; part < s.w->row_blocks; ++part) {
    tile_zero<0>();
    if (blocks2) tile_zero<1>();
    if (rows2) tile_zero<2>();
    if (rows2 && blocks2) tile_zero<3>();
    const int64_t begin = part * s.part_tiles * amx_tile, end = begin + s.part_tiles * amx_tile;
    for (int64_t k = begin; k < end; k += amx_tile) {
      tile_load<4>(a0 + k, 64);
      tile_load<6>(b0 + k, 64);
      tile_multiply<0, 4, 6>();
      if (blocks2) {
        tile_load<7>(b1 + k, 64);
        tile_multiply<1, 4, 7>();
      }
      if (rows2) {
        tile_load<5>(a1 + k, 64);
        tile_multiply<2, 5, 6>();
        if (blocks2) tile_multiply<3, 5, 7>();
      }
    }
    put<0, apart>(s, row, rows_0, column, part);
    if (blocks2) put<1, apart>(s, row, rows_0, column + 16, part);
    if (rows2) put<2, apart>(s, row + 16, std::min<int64_t>(16, rows_1), column, part);
    if (rows2 && blocks2) {
      put<3, apart>(s, row + 16, std::min<int64_t>(16, rows_1), column + 16, part);
    }
  }
}

// Tiles 0..3 are outputs, 4 and 5 rows, 6 and 7 weights.
static void configure(int64_t rows_0, int64_t rows_1) {
  TileConfig config;
  const int64_t rows[8] = {rows_0, rows_0, rows_1, rows_1, rows_0, rows_1, 16, 16};
  for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile], 64);
  tile_configure(config);
}

// Row tiles [row_begin, row_end), all with the rows configured, over the blocks of a task.
template <bool apart, bool rows2>
static void sweep(const Shape& s, int64_t row_begin, int64_t row_end, int64_t block, bool blocks2) {
  for (int64_t i = row_begin; i < row_end; i += rows2 ? 2 : 1) {
    if (blocks2) {
      square<apart, rows2, true>(s, i, block);
    } else {
      square<apart, rows2, false>(s, i, block);
    }
  }
}

template <bool apart>
static void run_task(const Shape& s) {
  const auto [row_begin, row_end] = std::pair(s.task->row_begin, s.task->row_end);
  const auto [block_begin, block_end] = std::pair(s.task->panel_begin, s.task->panel_end);
  const int64_t row_tiles = row_end - row_begin;
  const int64_t rows_last = s.task->rows.rows_of(row_end - 1);
  // Whole pairs first; then a pair or a single tile whose last rows may be fewer.
  const int64_t pairs_end = row_begin + (row_tiles - (rows_last < 16 ? 1 : 0)) / 2 * 2;
  if (pairs_end > row_begin) {
    configure(16, 16);
    for (int64_t block = block_begin; block < block_end; block += 2) {
      sweep<apart, true>(s, row_begin, pairs_end, block, block + 1 < block_end);
    }
  }
  const int64_t left = row_end - pairs_end;
  if (left == 2) {
    configure(16, rows_last);
    for (int64_t block = block_begin; block < block_end; block += 2) {
      sweep<apart, true>(s, pairs_end, row_end, block, block + 1 < block_end);
    }
  } else if (left == 1) {
    configure(rows_last, rows_last);
    for (int64_t block = block_begin; block < block_end; block += 2) {
      sweep<apart, false>(s, pairs_end, row_end, block, block + 1 < block_end);
    }
  }
  tile_release();
}

}  // namespace

void amx_bf16(const AmxTask& task) {
  const Shape s{&task, task.weight, task.weight->k_block_pad / 32};
  task.part_step == 0 ? run_task<false>(s) : run_task<true>(s);
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
