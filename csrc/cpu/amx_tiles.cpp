// The products of a linear on AMX tiles: outputs by rows, the weight being the A tile. Each output is
// one accumulator that takes k in order, 32 at a time, whatever rows stand beside it in a tile, and
// whether the weight was bfloat16 or is made so on the way.
//
// Nanoseconds of one product of 16 by 16 by 32 at 4.1 GHz: 4.6 in registers; 7.6 with its four
// operand loads for four products from the first cache; 9 to 11 with rows in the second, in squares
// of two panels by two tiles of rows. So many rows are done in squares, with quantised panels
// unpacked once for all of them; one or two tiles of rows go along with the weight as it is read,
// unpacked some blocks ahead since a tile is not loaded from the store buffer.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"
#include "amx_linear.h"
#define ASERVE_LEVEL 2

namespace aserve {
namespace {
#include "vec.inc"

#include "amx_unpack.inc"

#include "amx_finish.inc"

constexpr uint64_t ring = 8;          // of unpacked tiles
constexpr int64_t ahead = 4;
constexpr int64_t fetch_ahead = 8;    // tiles

// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. Of one row alone the first six have a column.
static void configure(bool one_row) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, one_row && tile < 6 ? 4 : 64);
  tile_configure(config);
}

#define ASERVE_INLINE_MEMBER inline __attribute__((always_inline))

// The tiles of a task's panels in the order they are wanted, as they are stored; behind the last
// panel, that one again.
template <Format F>
struct Cursor {
  const AmxTask& task;
  const int64_t tiles, panels;
  const char* at;
  int64_t left, which = 0;

  ASERVE_INLINE_MEMBER explicit Cursor(const AmxTask& t)
      : task(t), tiles(t.weight->k_tiles()), panels(panels_of(t)),
        at(t.weight->panel(panel_of(t, 0))), left(tiles) {}
  ASERVE_INLINE_MEMBER void step() {
    at += record_bytes(F);
    if (--left > 0) return;
    left = tiles;
    which = std::min(which + 1, panels - 1);
    at = task.weight->panel(panel_of(task, which));
  }
};

// Gives tile after tile of a task's panels. All of it is inline, and stays in registers.
template <Format F>
struct Reader {
  Cursor<F> next, fetch;
  char* unpacked;   // a ring of tiles
  uint64_t at = 0;  // where in the ring the next one is

  ASERVE_INLINE_MEMBER Reader(const AmxTask& task, char* tiles)
      : next(task), fetch(task), unpacked(tiles) {
    for (int64_t i = 0; i < fetch_ahead; ++i) fetch_one();
    if (F != Format::bf16) {
      for (int64_t i = 0; i < ahead; ++i) unpack_to(i * amx_tile);
    }
  }
  ASERVE_INLINE_MEMBER void fetch_one() {
    for (int64_t i = 0; i < record_bytes(F); i += 64) _mm_prefetch(fetch.at + i, _MM_HINT_T0);
    fetch.step();
  }
  ASERVE_INLINE_MEMBER void unpack_to(uint64_t place) {
    unpack_record<F>(next.at, unpacked + place % (ring * amx_tile));
    next.step();
  }
  ASERVE_INLINE_MEMBER const char* take() {
    fetch_one();
    if (F == Format::bf16) {
      const char* tile = next.at;
      next.step();
      return tile;
    }
    const char* tile = unpacked + at;
    unpack_to(at + ahead * amx_tile);
    at = (at + amx_tile) % (ring * amx_tile);
    return tile;
  }
};

// The part's k of the next panel by one tile of rows or two, into tiles C and C + 1: those of the
// part before are still being stored.
template <Format F, bool rows2, int C>
ASERVE_INLINE void stream_part(Reader<F>& reader, const char* rows, int64_t row_step, int64_t tiles,
                               float* sums, int64_t sums_step) {
  tile_zero<C>();
  if (rows2) tile_zero<C + 1>();
  for (int64_t k = 0; k < tiles; ++k, rows += amx_tile) {
    tile_load<6>(reader.take(), 64);
    tile_load<4>(rows, 64);
    tile_multiply<C, 6, 4>();
    if (rows2) {
      tile_load<5>(rows + row_step, 64);
      tile_multiply<C + 1, 6, 5>();
    }
  }
  tile_store<C>(sums, sums_step);
  if (rows2) tile_store<C + 1>(sums + 256, sums_step);
}

template <Format F, bool rows2, class Finish>
static void stream(const AmxTask& task) {
  const Weight& w = *task.weight;
  const int64_t part_tiles = w.k_block_pad / 32, panels = panels_of(task);
  const int64_t row_step = task.rows.k_tiles * amx_tile;
  constexpr int64_t step = std::is_same_v<Finish, FinishOne> ? 4 : 64;
  Reader<F> reader(task, static_cast<char*>(thread_scratch(scratch_tiles, ring * amx_tile)));
  Finish finish(task);
  for (int64_t which = 0; which < panels; ++which) {
    const char* rows = task.rows.row_tile(task.row_begin);
    for (int64_t part = 0; part < w.row_blocks; ++part, rows += part_tiles * amx_tile) {
      float* sums = finish.begin(which, part, task.row_begin, 1, rows2 ? 2 : 1);
      if (finish.parity() == 0) {
        stream_part<F, rows2, 0>(reader, rows, row_step, part_tiles, sums, step);
      } else {
        stream_part<F, rows2, 2>(reader, rows, row_step, part_tiles, sums, step);
      }
      finish.end_previous();
    }
  }
  finish.end_all();
}

// Two panels by two tiles of rows, or by one.
template <bool panels2, bool rows2>
static inline void square(const char* a0, const char* a1, const char* b0, const char* b1,
                          int64_t tiles, float* sums) {
  tile_zero<0>();
  if (rows2) tile_zero<1>();
  if (panels2) tile_zero<2>();
  if (panels2 && rows2) tile_zero<3>();
  for (int64_t k = 0; k < tiles * amx_tile; k += amx_tile) {
    tile_load<4>(b0 + k, 64);
    tile_load<6>(a0 + k, 64);
    tile_multiply<0, 6, 4>();
    if (rows2) {
      tile_load<5>(b1 + k, 64);
      tile_multiply<1, 6, 5>();
    }
    if (panels2) {
      tile_load<7>(a1 + k, 64);
      tile_multiply<2, 7, 4>();
      if (rows2) tile_multiply<3, 7, 5>();
    }
  }
  tile_store<0>(sums, 64);
  if (rows2) tile_store<1>(sums + 256, 64);
  if (panels2) tile_store<2>(sums + 512, 64);
  if (panels2 && rows2) tile_store<3>(sums + 768, 64);
}

// A panel's tiles: where they are, or unpacked into memory for them.
template <Format F>
static const char* panel_tiles(const Weight& w, int64_t panel, char* unpacked) {
  if (F == Format::bf16) return w.panel(panel);
  const char* record = w.panel(panel);
  for (int64_t i = 0; i < w.k_tiles(); ++i, record += record_bytes(F)) {
    unpack_record<F>(record, unpacked + i * amx_tile);
  }
  return unpacked;
}

// Panels that a pair of tiles of rows is multiplied with before the next pair: of the output's rows
// 256 bytes are written about the same time.
constexpr int64_t together = 4;

template <Format F>
static void squares(const AmxTask& task) {
  const Weight& w = *task.weight;
  const int64_t part_bytes = w.k_block_pad / 32 * amx_tile, panel_bytes = w.k_tiles() * amx_tile;
  const int64_t panels = panels_of(task), row_step = task.rows.k_tiles * amx_tile;
  const int64_t bytes = F == Format::bf16 ? 0 : together * panel_bytes;
  char* unpacked = static_cast<char*>(thread_scratch(scratch_tiles, bytes));
  Finish finish(task);
  for (int64_t begin = 0; begin < panels; begin += together) {
    const int64_t n = std::min(together, panels - begin);
    const char* a[together];
    for (int64_t i = 0; i < n; ++i) {
      a[i] = panel_tiles<F>(w, panel_of(task, begin + i), unpacked + i * panel_bytes);
    }
    for (int64_t row = task.row_begin; row < task.row_end; row += 2) {
      const int64_t rows = std::min<int64_t>(2, task.row_end - row);
      const char* b0 = task.rows.row_tile(row);
      for (int64_t i = 0; i < n; i += 2) {
        const int64_t panels_n = std::min<int64_t>(2, n - i);
        const auto run = panels_n == 2 ? (rows == 2 ? square<true, true> : square<true, false>)
                                       : (rows == 2 ? square<false, true> : square<false, false>);
        for (int64_t part = 0, k = 0; part < w.row_blocks; ++part, k += part_bytes) {
          float* sums = finish.begin(begin + i, part, row, panels_n, rows);
          run(a[i] + k, a[i + panels_n - 1] + k, b0 + k, b0 + row_step + k, part_bytes / amx_tile,
              sums);
          finish.end_previous();
        }
      }
    }
  }
  finish.end_all();
}

template <Format F>
static void run_as(const AmxTask& task) {
  const int64_t tiles = task.row_end - task.row_begin;
  const bool one_row = tiles == 1 && task.rows.rows_of(task.row_begin) == 1;
  configure(one_row);
  if (one_row) {
    stream<F, false, FinishOne>(task);
  } else if (tiles > 2 || (F == Format::bf16 && tiles == 2)) {
    squares<F>(task);
  } else if (tiles == 2) {
    stream<F, true, Finish>(task);
  } else {
    stream<F, false, Finish>(task);
  }
  tile_release();
}

}  // namespace

void amx_run(const AmxTask& task) {
  switch (task.weight->format) {
    case Format::q8:
      return run_as<Format::q8>(task);
    case Format::q4:
      return run_as<Format::q4>(task);
    case Format::q4m:
      return run_as<Format::q4m>(task);
    default:
      return run_as<Format::bf16>(task);
  }
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
