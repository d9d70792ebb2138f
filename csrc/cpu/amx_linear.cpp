// Linear on AMX tiles. Each output is one accumulator that takes k in order, 32 at a time, whatever
// rows share its tile; a tile has as many rows as there are, so one row costs one row's time.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "aserve/index.h"
#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"

namespace aserve {
namespace {

constexpr int64_t tile_bytes = 1024;

// One call's shape in tiles of 32 k.
struct Shape {
  const Weight* w;
  int64_t m;
  int64_t part_tiles;  // of a row block
  int64_t k_tiles;     // of all row blocks
  const char* rows;    // packed: [m / 16][k_tiles][16 rows][32]
  float* y;
  int64_t part_step;  // floats from the sums of a row block to the next; 0: they are added up

  const char* row_tile(int64_t i) const { return rows + i * k_tiles * tile_bytes; }
  const char* weight_block(int64_t i) const {
    return static_cast<const char*>(w->packed) + i * k_tiles * tile_bytes;
  }
};

// Sixteen rows (or what is left) of x as bfloat16 tiles.
static void pack_rows(const Shape& s, const float* x, int64_t tile, char* to) {
  const Weight& w = *s.w;
  const int64_t rows = std::min<int64_t>(16, s.m - tile * 16);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x + (tile * 16 + r) * w.k;
    char* out = to + tile * s.k_tiles * tile_bytes + r * 64;
    for (int64_t part = 0; part < w.row_blocks; ++part, row += w.k_block) {
      for (int64_t k = 0; k < w.k_block; k += 32, out += tile_bytes) {
        const int64_t n = w.k_block - k;
        const auto low = static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1);
        const auto high = static_cast<__mmask16>(n >= 32 ? 0xffff : n > 16 ? (1 << (n - 16)) - 1 : 0);
        const __m512 a = _mm512_maskz_loadu_ps(low, row + k);
        const __m512 b = _mm512_maskz_loadu_ps(high, row + k + 16);
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(b, a));
      }
    }
  }
}

// Adds a stored tile to y: the first row block sets, later ones add, the last adds the bias.
static void settle(const Shape& s, const float* tile, int64_t row, int64_t rows, int64_t column,
                   int64_t part) {
  const Weight& w = *s.w;
  const int64_t n = std::min<int64_t>(16, w.n - column);
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  const bool last = part + 1 == w.row_blocks && w.bias != nullptr;
  const __m512 bias = last ? _mm512_maskz_loadu_ps(mask, w.bias + column) : _mm512_setzero_ps();
  for (int64_t r = 0; r < rows; ++r) {
    float* to = s.y + (row + r) * w.n + column;
    __m512 value = _mm512_load_ps(tile + r * 16);
    if (part > 0) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), value);
    if (last) value = _mm512_add_ps(value, bias);
    _mm512_mask_storeu_ps(to, mask, value);
  }
}

// Row blocks kept apart: the first n columns of a stored tile.
static void keep(const float* tile, int64_t rows, int64_t n, float* to, int64_t step) {
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  for (int64_t r = 0; r < rows; ++r) {
    _mm512_mask_storeu_ps(to + r * step, mask, _mm512_load_ps(tile + r * 16));
  }
}

// `apart` is known to the compiler all the way up: asked for here it cost a narrow linear 7%.
template <int T, bool apart>
static inline void put(const Shape& s, int64_t row, int64_t rows, int64_t column, int64_t part) {
  const Weight& w = *s.w;
  const bool as_is = apart || (w.row_blocks == 1 && w.bias == nullptr);
  float* y = s.y + row * w.n + column;
  if (apart) y += part * s.part_step;
  if (as_is && column + 16 <= w.n) {
    tile_store<T>(y, w.n * 4);
    return;
  }
  alignas(64) float tile[256];
  tile_store<T>(tile, 64);
  if (apart) {
    keep(tile, rows, w.n - column, y, w.n);
  } else {
    settle(s, tile, row, rows, column, part);
  }
}

// Two tiles of rows by two blocks of the weight; without the second of either where there is none.
template <bool apart, bool rows2, bool blocks2>
static void square(const Shape& s, int64_t row_tile, int64_t block) {
  const int64_t row = row_tile * 16;
  const int64_t rows_0 = std::min<int64_t>(16, s.m - row), rows_1 = s.m - row - 16;
  const char* a0 = s.row_tile(row_tile);
  const char* a1 = rows2 ? s.row_tile(row_tile + 1) : a0;
  const char* b0 = s.weight_block(block);
  const char* b1 = blocks2 ? s.weight_block(block + 1) : b0;
  for (int64_t part = 0; part < s.w->row_blocks; ++part) {
    tile_zero<0>();
    if (blocks2) tile_zero<1>();
    if (rows2) tile_zero<2>();
    if (rows2 && blocks2) tile_zero<3>();
    const int64_t begin = part * s.part_tiles * tile_bytes, end = begin + s.part_tiles * tile_bytes;
    for (int64_t k = begin; k < end; k += tile_bytes) {
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
    put<0, apart>(s, row, rows_0, block * 16, part);
    if (blocks2) put<1, apart>(s, row, rows_0, block * 16 + 16, part);
    if (rows2) put<2, apart>(s, row + 16, std::min<int64_t>(16, rows_1), block * 16, part);
    if (rows2 && blocks2) {
      put<3, apart>(s, row + 16, std::min<int64_t>(16, rows_1), block * 16 + 16, part);
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
static void run_task(const Shape& s, int64_t row_begin, int64_t row_end, int64_t block_begin,
                     int64_t block_end) {
  const int64_t row_tiles = row_end - row_begin;
  const int64_t rows_last = std::min<int64_t>(16, s.m - (row_end - 1) * 16);
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

void amx_linear(Team& team, const Weight& w, const float* x, int64_t m, float* y,
                int64_t part_step) {
  const int64_t part_tiles = w.k_block_pad / 32, k_tiles = part_tiles * w.row_blocks;
  const int64_t row_tiles = ceil_div(m, 16);
  char* rows = static_cast<char*>(thread_scratch(scratch_rows, row_tiles * k_tiles * tile_bytes));
  const Shape s{&w, m, part_tiles, k_tiles, rows, y, part_step};
  const auto pack = [&](int64_t tile) { pack_rows(s, x, tile, rows); };
  if (m * w.k <= 32768) {  // done before another thread is awake
    for (int64_t tile = 0; tile < row_tiles; ++tile) pack(tile);
  } else {
    team.run(row_tiles, pack);
  }
  // The rows of a task stay in the second cache (1 MiB of it) and the weight streams past them.
  const int64_t rows_fit = std::max<int64_t>(2, (int64_t{1} << 20) / (k_tiles * tile_bytes) / 2 * 2);
  const int64_t rows_task = std::min(rows_fit, row_tiles);
  const int64_t blocks = w.n_blocks();
  const int64_t blocks_task = std::max<int64_t>(2, std::min<int64_t>(64, blocks / 8 / 2 * 2));
  const int64_t row_tasks = ceil_div(row_tiles, rows_task);
  const int64_t block_tasks = ceil_div(blocks, blocks_task);
  const auto run = part_step == 0 ? run_task<false> : run_task<true>;
  team.run(row_tasks * block_tasks, [&](int64_t i) {
    const int64_t row = i / block_tasks * rows_task, block = i % block_tasks * blocks_task;
    run(s, row, std::min(row + rows_task, row_tiles), block, std::min(block + blocks_task, blocks));
  });
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
