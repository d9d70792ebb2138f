// Linears on AMX tiles: rows are packed once, then threads take stretches of panels.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "aserve/index.h"
#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"
#include "amx_linear.h"

namespace aserve {
namespace {

// Sixteen rows (or what is left) of x as bfloat16 tiles, pairs of k first.
static void pack_tile(const Weight& w, const AmxRows& rows, const float* x, int64_t tile) {
  const int64_t n = rows.rows_of(tile);
  const float* from = x + tile * 16 * w.k;
  char* out = rows.row_tile(tile);
  for (int64_t part = 0; part < w.row_blocks; ++part, from += w.k_block) {
    for (int64_t k = 0; k < w.k_block; k += 32, out += amx_tile) {
      const int64_t left = w.k_block - k;
      __m512i r[16];
      for (int64_t i = 0; i < 16; ++i) {
        const float* row = from + i * w.k + k;
        const __m512 a = _mm512_maskz_loadu_ps(i < n ? first(left) : 0, row);
        const __m512 b = _mm512_maskz_loadu_ps(i < n ? first(left - 16) : 0, row + 16);
        r[i] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
      }
      transpose(r);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(out + i * 64, r[i]);
    }
  }
}

// Memory for m rows as this weight takes them.
static AmxRows rows_for(const Weight& w, int64_t m, Scratch slot) {
  AmxRows rows{m, w.k_tiles(), nullptr};
  const int64_t bytes = rows.row_tiles() * rows.k_tiles * amx_tile;
  rows.tiles = static_cast<char*>(thread_scratch(slot, bytes));
  return rows;
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

// How many panels a task takes: as many tasks for each thread, and no start of a panel more often
// than it need be, since memory is asked only some blocks ahead.
static int64_t panels_of_task(const Team& team, int64_t panels) {
  const int64_t threads = team.threads();
  const int64_t tasks = std::clamp<int64_t>((panels + 3 * threads) / (6 * threads), 1, 8) * threads;
  return std::min<int64_t>(64, ceil_div(ceil_div(panels, tasks), 2) * 2);
}

// Shares out a linear of packed rows.
static void share(Team& team, const Weight& w, const AmxRows& rows, float* y, int64_t part_step) {
  // The rows of a task stay in the second cache (1 MiB of it) and the weight streams past them.
  const int64_t row_tiles = rows.row_tiles(), panels = w.n_blocks();
  const int64_t fit = std::max<int64_t>(2, (int64_t{1} << 20) / (rows.k_tiles * amx_tile) / 2 * 2);
  const int64_t rows_task = std::min(fit, row_tiles), panels_task = panels_of_task(team, panels);
  const int64_t row_tasks = ceil_div(row_tiles, rows_task);
  const int64_t panel_tasks = ceil_div(panels, panels_task);
  team.run(row_tasks * panel_tasks, [&](int64_t i) {
    const int64_t row = i / panel_tasks * rows_task, panel = i % panel_tasks * panels_task;
    amx_run({&w, rows, row, std::min(row + rows_task, row_tiles), panel,
             std::min(panel + panels_task, panels), y, part_step, nullptr});
  });
}

}  // namespace

void amx_linear(Team& team, const Weight& w, const float* x, int64_t m, float* y,
                int64_t part_step) {
  share(team, w, pack_rows(team, w, x, m), y, part_step);
}

bool amx_gated_fits(const Weight& gate_up, const Weight& down) {
  return gate_up.tiled && down.tiled && down.k_block % 32 == 0;
}

// silu(gate) * up goes straight into the rows of `down`. What the hidden layer costs is then its
// bfloat16, read and written once: of 512 rows of SmolLM2 1.5 MB, where float32 of gate_up and hidden
// were 9 MB.
void amx_gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
               float* y, int64_t part_step) {
  constexpr int64_t rows_max = 256;  // of a chunk: its hidden rows stay in the second cache
  for (int64_t row = 0; row < m; row += rows_max) {
    const int64_t n = std::min(rows_max, m - row), panels = down.k / 16;
    const int64_t panels_task = panels_of_task(team, panels);
    const AmxRows rows = pack_rows(team, gate_up, x + row * gate_up.k, n);
    const AmxRows hidden = rows_for(down, n, scratch_hidden);
    team.run(ceil_div(panels, panels_task), [&](int64_t i) {
      const int64_t panel = i * panels_task;
      amx_run({&gate_up, rows, 0, rows.row_tiles(), panel,
               std::min(panel + panels_task, panels), nullptr, 0, &hidden});
    });
    share(team, down, hidden, y + row * down.n, part_step);
  }
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
