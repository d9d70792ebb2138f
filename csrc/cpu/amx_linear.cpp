// Linears on AMX tiles: rows are packed once, then threads take stretches of panels.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "aserve/index.h"
#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx_linear.h"
#define ASERVE_LEVEL 2

namespace aserve {
namespace {
#include "vec.inc"

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

// The sum of 32 bfloat16: the tree of vec.inc over the sixteen sums of k and k + 16.
static inline float sum_of(__m512i packed) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(packed));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(packed, 1));
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)),
                                            _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))));
}

// Sixteen rows (or what is left) of x as bfloat16 tiles.
static void pack_tile(const Weight& w, const AmxRows& rows, const float* x, int64_t tile) {
  const bool has_sums = w.format == Format::q4m;
  for (int64_t r = 0; r < rows.rows_of(tile); ++r) {
    const float* row = x + (tile * 16 + r) * w.k;
    char* out = rows.row_tile(tile) + r * 64;
    float* sums = rows.sums_of(tile) + r;
    for (int64_t part = 0; part < w.row_blocks; ++part, row += w.k_block) {
      for (int64_t k = 0; k < w.k_block; k += 32, out += amx_tile, sums += 16) {
        const int64_t n = w.k_block - k;
        const __m512 a = _mm512_maskz_loadu_ps(first(n), row + k);
        const __m512 b = _mm512_maskz_loadu_ps(first(n - 16), row + k + 16);
        const auto packed = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        _mm512_store_si512(out, packed);
        if (has_sums) *sums = sum_of(packed);
      }
    }
  }
}

// Memory for m rows as this weight takes them.
static AmxRows rows_for(const Weight& w, int64_t m, Scratch slot) {
  AmxRows rows{m, w.k_tiles(), nullptr, nullptr};
  const int64_t tiles = rows.row_tiles() * rows.k_tiles;
  const int64_t sums = w.format == Format::q4m ? tiles * 64 : 0;
  rows.tiles = static_cast<char*>(thread_scratch(slot, tiles * amx_tile + sums));
  rows.sums = reinterpret_cast<float*>(rows.tiles + tiles * amx_tile);
  return rows;
}

static void run_panels(const AmxTask& task) {
  task.weight->format == Format::bf16 ? amx_bf16(task) : amx_blocks(task);
}

// Rows of a task pass through a buffer, so that they are written 256 bytes at a time: a stored tile
// alone writes a line to each of sixteen pages, most often all in one set of the first cache.
constexpr int64_t staged_panels = 4;

static void run_staged(const AmxTask& task) {
  const int64_t rows = std::min(task.rows.m, task.row_end * 16) - task.row_begin * 16;
  constexpr int64_t step = staged_panels * 16;
  auto* stage = static_cast<float*>(thread_scratch(scratch_stage, rows * step * 4));
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += staged_panels) {
    const int64_t column = (panel - task.panel_begin) * 16;
    AmxTask some = task;
    some.panel_begin = panel;
    some.panel_end = std::min(panel + staged_panels, task.panel_end);
    some.out = stage;
    some.out_step = some.columns = step;
    run_panels(some);
    const int64_t columns = std::min((some.panel_end - panel) * 16, task.columns - column);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = task.out + r * task.out_step + column;
      for (int64_t i = 0; i < columns; i += 16) {
        _mm512_mask_storeu_ps(to + i, first(columns - i), _mm512_load_ps(stage + r * step + i));
      }
    }
  }
}

// Shares out a linear of packed rows.
static void share(Team& team, const Weight& w, const AmxRows& rows, float* y, int64_t part_step) {
  // The rows of a task stay in the second cache (1 MiB of it) and the weight streams past them.
  const int64_t row_tiles = rows.row_tiles(), panels = w.n_blocks();
  const int64_t fit = std::max<int64_t>(2, (int64_t{1} << 20) / (rows.k_tiles * amx_tile) / 2 * 2);
  const int64_t rows_task = std::min(fit, row_tiles);
  const int64_t panels_task = std::max<int64_t>(2, std::min<int64_t>(64, panels / 8 / 2 * 2));
  const int64_t row_tasks = ceil_div(row_tiles, rows_task);
  const int64_t panel_tasks = ceil_div(panels, panels_task);
  team.run(row_tasks * panel_tasks, [&](int64_t i) {
    const int64_t row = i / panel_tasks * rows_task, panel = i % panel_tasks * panels_task;
    AmxTask task{};
    task.weight = &w;
    task.rows = rows;
    task.row_begin = row;
    task.row_end = std::min(row + rows_task, row_tiles);
    task.panel_begin = panel;
    task.panel_end = std::min(panel + panels_task, panels);
    task.out = y + row * 16 * w.n + panel * 16;
    task.out_step = w.n;
    task.columns = w.n - panel * 16;
    task.part_step = part_step;
    part_step == 0 && task.row_end - row > 2 ? run_staged(task) : run_panels(task);
  });
}

// x as this weight takes it.
static AmxRows pack_rows(Team& team, const Weight& w, const float* x, int64_t m) {
  const AmxRows rows = rows_for(w, m, scratch_rows);
  const auto pack = [&](int64_t tile) { pack_tile(w, rows, x, tile); };
  if (m * w.k <= 32768) {  // done before another thread is awake
    for (int64_t tile = 0; tile < rows.row_tiles(); ++tile) pack(tile);
  } else {
    team.run(rows.row_tiles(), pack);
  }
  return rows;
}

// silu(gate) * up of some panels of both, straight into the rows of `down`; gate and up stand beside
// each other in a row of the stage. What the hidden layer costs is then its bfloat16, read and
// written once: of 512 rows of SmolLM2 1.5 MB, where float32 of gate_up and hidden were 9 MB.
static void gate_panels(const Weight& w, const Weight& down, const AmxRows& rows,
                        const AmxRows& hidden, int64_t panel, int64_t panels) {
  const int64_t wide = panels * 16, step = 2 * wide;
  auto* stage = static_cast<float*>(thread_scratch(scratch_stage, rows.m * step * 4));
  for (int64_t half = 0; half < 2; ++half) {
    AmxTask task{};
    task.weight = &w;
    task.rows = rows;
    task.row_end = rows.row_tiles();
    task.panel_begin = half * (w.n_blocks() / 2) + panel;
    task.panel_end = task.panel_begin + panels;
    task.out = stage + half * wide;
    task.out_step = step;
    task.columns = wide;
    run_panels(task);
  }
  const bool has_sums = down.format == Format::q4m;
  for (int64_t row = 0; row < rows.m; ++row) {
    const float* gate = stage + row * step;
    const float* up = gate + wide;
    const int64_t r = row % 16;
    char* out = hidden.row_tile(row / 16) + panel / 2 * amx_tile + r * 64;
    float* sums = hidden.sums_of(row / 16) + panel / 2 * 16 + r;
    for (int64_t i = 0; i < wide; i += 32, out += amx_tile, sums += 16) {
      const V a = silu_mul_one(load(gate + i), load(up + i));
      const V b = silu_mul_one(load(gate + i + 16), load(up + i + 16));
      const auto packed = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
      _mm512_store_si512(out, packed);
      if (has_sums) *sums = sum_of(packed);
    }
  }
}

}  // namespace

void amx_linear(Team& team, const Weight& w, const float* x, int64_t m, float* y,
                int64_t part_step) {
  share(team, w, pack_rows(team, w, x, m), y, part_step);
}

bool amx_gated_fits(const Weight& gate_up, const Weight& down) {
  return gate_up.format != Format::f32 && down.format != Format::f32 && down.k_block % 32 == 0;
}

void amx_gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
               float* y, int64_t part_step) {
  constexpr int64_t rows_max = 256;  // of a chunk: its hidden rows stay in the second cache
  for (int64_t row = 0; row < m; row += rows_max) {
    const int64_t n = std::min(rows_max, m - row), panels = down.k / 16;
    const int64_t panels_task = n <= 16 ? 8 : 4;
    const AmxRows rows = pack_rows(team, gate_up, x + row * gate_up.k, n);
    const AmxRows hidden = rows_for(down, n, scratch_hidden);
    team.run(ceil_div(panels, panels_task), [&](int64_t i) {
      const int64_t panel = i * panels_task;
      gate_panels(gate_up, down, rows, hidden, panel, std::min(panels_task, panels - panel));
    });
    share(team, down, hidden, y + row * down.n, part_step);
  }
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
