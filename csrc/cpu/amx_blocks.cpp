// Quantised weights on AMX tiles. A block of 32 k by 16 outputs is made a tile of bfloat16 integers,
// multiplied from zero with a tile of rows, stored, and its scale applied in float32.
//
// Cycles for a block and 16 rows at 4.1 GHz, counted from the parts alone: two tile loads 20, product
// 18 to 23, tile store 17, 16 rows scaled 16 to 20. A loop of nothing else takes 45, with a minimum
// 55: 16384 operations in 55 cycles are 1.2 TFLOP/s a core, half of what bfloat16 could have, as
// storing each product takes as long as the product. In place, with outputs written and blocks
// unpacked, 67 (q4) and 80 to 90 (q4m) were measured, on a machine that was shared.
// Two orders matter. A tile is stored after the next product is begun (33 cycles for product and
// store become 20), and its rows are read three products later, when they have left the store buffer.
//
// One to a few rows: 320 bytes (q4m) in 52 cycles are 25 GB/s a core, twice what memory gives one, so
// a row is bound by memory and seven more cost 10 cycles a block. Unpacking (29 of the 52: a lookup,
// a shift and a store for 32 values) runs six blocks ahead, as a tile load is not served from the
// store buffer either. With more rows a panel is unpacked once for all of them.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "aserve/index.h"
#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"
#include "amx_linear.h"

namespace aserve {
namespace {

#define ASERVE_UNROLL _Pragma("GCC unroll 16")
#define ASERVE_INLINE_MEMBER inline __attribute__((always_inline))
#define ASERVE_INLINE static ASERVE_INLINE_MEMBER

constexpr int64_t ring = 8, ahead = 6;  // of unpacked tiles
constexpr int lag = 3;                  // products between a tile's own and its scaling

// A run of outputs of 16 columns by up to 16 rows, each summed over all k: one tile of rows and panel
// after panel, whose blocks are unpacked on the way, or one panel and tile after tile of rows.
struct Pass {
  const AmxTask* task;
  int64_t n, panel, row_tile;  // how many, and the first
  int64_t n_rows;
  char* unpacked;
  float* products;  // four stored tiles
  float* total;     // [16][16]
};

// bfloat16 of a nibble's value, in each half of the lookup.
template <Format F>
static inline __m512i nibble_table() {
  alignas(64) uint16_t value[32];
  for (int i = 0; i < 32; ++i) {
    value[i] = narrow(static_cast<float>(i % 16 - (F == Format::q4 ? 8 : 0)));
  }
  return _mm512_load_si512(value);
}

template <Format F>
static inline void unpack(const char* from, char* to, __m512i table) {
  if (F == Format::q8) {
    ASERVE_UNROLL
    for (int row = 0; row < 16; ++row) {
      const auto* bytes = reinterpret_cast<const __m128i*>(from + row * 32);
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(bytes)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(bytes + 1)));
      _mm512_store_si512(to + row * 64, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return;
  }
  ASERVE_UNROLL
  for (int group = 0; group < 4; ++group) {
    const __m512i words = _mm512_load_si512(from + group * 64);
    char* rows = to + group * 256;
    _mm512_store_si512(rows, _mm512_permutexvar_epi16(words, table));
    _mm512_store_si512(rows + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
    _mm512_store_si512(rows + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table));
    _mm512_store_si512(rows + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table));
  }
}

// The blocks of a task's panels one after the other, a panel ahead of them asked for from memory.
template <Format F>
struct Stream {
  static constexpr int64_t bytes = F == Format::q8 ? 512 : 256;
  const Weight* w;
  const char* panel;
  int64_t panels, tile, next;
  __m512i table;

  Stream(const AmxTask& task, int64_t begin)
      : w(task.weight), panel(w->panel(begin)), panels(task.panel_end - begin), tile(0), next(0),
        table(nibble_table<F>()) {}

  void unpack_next(char* to) {
    if (panels == 0) return;
    const int64_t step = w->panel_bytes();
    const char* from = panel + tile * bytes;
    unpack<F>(from, to, table);
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(from + step + i, _MM_HINT_T0);
    const char* scales = panel + step + tile * 32;
    _mm_prefetch(scales + w->scales_at(), _MM_HINT_T0);
    if (F == Format::q4m) _mm_prefetch(scales + w->minima_at(), _MM_HINT_T0);
    if (++tile == w->k_tiles()) {
      tile = 0;
      panel += step;
      --panels;
    }
  }
};

static inline __m512 halves(const char* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1);
}

// An output being summed.
struct Output {
  const char* scales;
  const char* minima;
  const float* sums;
  float* out;
  const float* bias;
  int64_t columns;
};

template <bool streams>
static inline Output output(const Pass& p, int64_t i) {
  const AmxTask& task = *p.task;
  const Weight& w = *task.weight;
  const int64_t panel = p.panel + (streams ? i : 0), row = p.row_tile + (streams ? 0 : i);
  const int64_t column = (panel - task.panel_begin) * 16;
  return {w.panel(panel) + w.scales_at(),
          w.panel(panel) + w.minima_at(),
          task.rows.sums_of(row),
          task.out + (row - task.row_begin) * 16 * task.out_step + column,
          w.bias == nullptr ? nullptr : w.bias + panel * 16,
          task.columns - column};
}

// Rows of 16 floats to `out`, with the bias if there is one.
static void put(const Pass& p, const Output& o, float* out, const float* bias) {
  const __mmask16 mask = first(o.columns);
  const __m512 add = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, bias);
  for (int64_t r = 0; r < p.n_rows; ++r) {
    const __m512 value = _mm512_load_ps(p.total + r * 16);
    _mm512_mask_storeu_ps(out + r * p.task->out_step, mask,
                          bias == nullptr ? value : _mm512_add_ps(value, add));
  }
}

// Tiles: 0 and 1 products, 4 rows, of sixteen; 2 and 3 products, 5 rows, of the last; 6, 7 weights.
template <bool last, bool odd>
static inline void multiply(const char* rows, const char* tile) {
  constexpr int product = (last ? 2 : 0) + (odd ? 1 : 0), from = last ? 5 : 4, by = odd ? 7 : 6;
  tile_load<from>(rows, 64);
  tile_load<by>(tile, 64);
  tile_zero<product>();
  tile_multiply<product, from, by>();
}
template <bool last, bool odd>
static inline void keep(float* to) {
  tile_store<(last ? 2 : 0) + (odd ? 1 : 0)>(to, 64);
}


// Begins product after product, each a tile of rows by a tile of the weight.
template <Format F, bool last, bool streams>
struct Products {
  const char* rows;
  char* unpacked;
  Stream<F>* stream;
  int64_t tiles, begun, k;

  ASERVE_INLINE_MEMBER void begin() {
    if (streams) stream->unpack_next(unpacked + (begun + ahead) % ring * amx_tile);
    const char* row = rows + (streams ? k : begun) * amx_tile;
    const char* tile = unpacked + (streams ? begun % ring : k) * amx_tile;
    begun % 2 == 0 ? multiply<last, false>(row, tile) : multiply<last, true>(row, tile);
    ++begun;
    if (++k == tiles) k = 0;
  }
};

template <bool last>
ASERVE_INLINE void keep_next(const Pass& p, int64_t i) {
  float* to = p.products + i % 4 * 256;
  i % 2 == 0 ? keep<last, false>(to) : keep<last, true>(to);
}

// A row block is complete: written by itself, or added to those before it.
template <int R>
ASERVE_INLINE void end_part(const Pass& p, const Output& o, int64_t part, __m512 (&acc)[R]) {
  const bool adds = part > 0 && p.task->part_step == 0;
  float* total = p.total;
  ASERVE_UNROLL
  for (int r = 0; r < R; ++r) {
    if (adds) acc[r] = _mm512_add_ps(_mm512_load_ps(total + r * 16), acc[r]);
    _mm512_store_ps(total + r * 16, acc[r]);
  }
  if (p.task->part_step != 0) put(p, o, o.out + part * p.task->part_step, nullptr);
}

// R rows: those there are, rounded up. Before product i is scaled, product i + 3 is begun, and
// product i + 2 stored after.
template <Format F, int R, bool last, bool streams>
static void pass(const Pass& p, Stream<F>* stream) {
  const Weight& w = *p.task->weight;
  const int64_t tiles = w.k_tiles(), part_tiles = w.k_block_pad / 32, n = p.n * tiles;
  Products<F, last, streams> next{p.task->rows.row_tile(p.row_tile), p.unpacked, stream, tiles, 0,
                                  0};
  for (int64_t i = 0; i < lag && i < n; ++i) {
    next.begin();
    if (i > 0) keep_next<last>(p, i - 1);
  }
  if (n < lag) keep_next<last>(p, n - 1);
  int64_t i = 0;
  for (int64_t which = 0; which < p.n; ++which) {
    const Output o = output<streams>(p, which);
    int64_t k = 0;
    for (int64_t part = 0; part < w.row_blocks; ++part) {
      __m512 acc[R];
      ASERVE_UNROLL
      for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
      for (const int64_t end = k + part_tiles; k < end; ++k, ++i) {
        if (i + lag < n) next.begin();
        const float* product = p.products + i % 4 * 256;
        const __m512 d = halves(o.scales + k * 32);
        ASERVE_UNROLL
        for (int r = 0; r < R; ++r) {
          acc[r] = _mm512_fmadd_ps(d, _mm512_load_ps(product + r * 16), acc[r]);
        }
        if (F == Format::q4m) {
          const __m512 m = halves(o.minima + k * 32);
          const float* sums = o.sums + k * 16;
          ASERVE_UNROLL
          for (int r = 0; r < R; ++r) {
            acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(sums[r]), acc[r]);
          }
        }
        if (i + lag <= n) keep_next<last>(p, i + lag - 1);
      }
      end_part<R>(p, o, part, acc);
    }
    if (p.task->part_step == 0) put(p, o, o.out, o.bias);
  }
}

template <Format F, bool streams>
static void pass_last(const Pass& p, Stream<F>* stream) {
  const auto run = p.n_rows > 8   ? pass<F, 16, true, streams>
                   : p.n_rows > 4 ? pass<F, 8, true, streams>
                   : p.n_rows > 1 ? pass<F, 4, true, streams>
                                  : pass<F, 1, true, streams>;
  run(p, stream);
}

template <Format F>
static void run_task(const AmxTask& task) {
  const int64_t tiles = task.weight->k_tiles(), row_last = task.row_end - 1;
  const int64_t rows_last = task.rows.rows_of(row_last), panels = task.panel_end - task.panel_begin;
  TileConfig config;
  const int64_t rows[8] = {16, 16, rows_last, rows_last, 16, rows_last, 16, 16};
  for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile], 64);
  tile_configure(config);
  alignas(64) float products[4 * 256] = {}, total[256];
  const bool streams = row_last == task.row_begin;
  char* unpacked =
      static_cast<char*>(thread_scratch(scratch_tiles, (streams ? ring : tiles) * amx_tile));
  Stream<F> stream(task, task.panel_begin);
  Pass p{&task, panels, task.panel_begin, row_last, rows_last, unpacked, products, total};
  if (streams) {
    for (int64_t i = 0; i < ahead; ++i) stream.unpack_next(unpacked + i * amx_tile);
    pass_last<F, true>(p, &stream);
  }
  for (; !streams && p.panel < task.panel_end; ++p.panel) {
    for (int64_t i = 0; i < tiles; ++i) stream.unpack_next(unpacked + i * amx_tile);
    const int64_t whole = row_last + (rows_last == 16 ? 1 : 0);
    p.row_tile = task.row_begin;
    p.n = whole - task.row_begin;
    p.n_rows = 16;
    pass<F, 16, false, false>(p, nullptr);
    if (whole > row_last) continue;
    p.row_tile = row_last;
    p.n = 1;
    p.n_rows = rows_last;
    pass_last<F, false>(p, nullptr);
  }
  tile_release();
}

}  // namespace

void amx_blocks(const AmxTask& task) {
  switch (task.weight->format) {
    case Format::q8:
      return run_task<Format::q8>(task);
    case Format::q4:
      return run_task<Format::q4>(task);
    default:
      return run_task<Format::q4m>(task);
  }
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
