#include "aserve/linear.h"

#include <algorithm>

#include "aserve/index.h"
#include "aserve/rows.h"
#include "kernels.h"

namespace aserve {
namespace {

// x as the kernels of a level take it: rounded unless the weight is float32, with sums for minima.
LinearTask rounded_rows(Team& team, const Weight& w, const float* x, int64_t m) {
  LinearTask task{};
  task.weight = &w;
  task.x = x;
  if (w.format == Format::f32) return task;
  const Kernels& kernel = kernels();
  const bool sums = w.format == Format::q4m;
  const int64_t sums_row = sums ? w.k / 32 : 0;
  float* rounded = static_cast<float*>(thread_scratch(scratch_rows, m * (w.k + sums_row) * 4));
  float* sums_to = rounded + m * w.k;
  team.run(ceil_div(m, 64), [&](int64_t i) {
    const int64_t begin = i * 64, rows = std::min<int64_t>(64, m - begin);
    float* to = rounded + begin * w.k;
    kernel.round_bf16(x + begin * w.k, rows * w.k, to);
    if (sums) kernel.sums(to, rows * w.k, sums_to + begin * sums_row);
  });
  task.x = rounded;
  task.sums = sums_to;
  return task;
}

// How many rows of gate_up pass through memory at a time.
constexpr int64_t gated_rows = 128;

}  // namespace

void linear(Team& team, const Weight& w, const float* x, int64_t m, float* y, int64_t part_step) {
  if (m == 0) return;
#if defined(__x86_64__)
  if (w.tiled) {
    return amx_linear(team, w, x, m, y, part_step);
  }
#endif
  const Kernels& kernel = kernels();
  const LinearTask whole = rounded_rows(team, w, x, m);
  // Few rows: share out the weight finely. Many rows: pieces of both, so that a panel of the weight
  // stays in the second cache while the rows of the task pass over it.
  const int64_t rows_task = 64, panels = w.n_blocks();
  const int64_t panels_task = std::max<int64_t>(4, std::min<int64_t>(64, panels / 16 / 4 * 4));
  const int64_t row_tasks = ceil_div(m, rows_task), panel_tasks = ceil_div(panels, panels_task);
  team.run(row_tasks * panel_tasks, [&](int64_t i) {
    const int64_t row = i % row_tasks * rows_task, panel = i / row_tasks * panels_task;
    LinearTask task = whole;
    task.x += row * w.k;
    task.sums += w.format == Format::q4m ? row * w.k / 32 : 0;
    task.rows = std::min(rows_task, m - row);
    task.panel_begin = panel;
    task.panel_end = std::min(panel + panels_task, panels);
    task.y = y + row * w.n;
    task.part_step = part_step;
    kernel.linear(task);
  });
}

void gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
           float* y, int64_t part_step) {
  if (m == 0) return;
#if defined(__x86_64__)
  if (amx_gated_fits(gate_up, down)) {
    return amx_gated(team, gate_up, down, x, m, y, part_step);
  }
#endif
  const int64_t dim = down.k, rows_max = std::min(m, gated_rows);
  auto* both = static_cast<float*>(thread_scratch(scratch_gate_up, rows_max * gate_up.n * 4));
  auto* hidden = static_cast<float*>(thread_scratch(scratch_hidden, rows_max * dim * 4));
  for (int64_t row = 0; row < m; row += gated_rows) {
    const int64_t rows = std::min(gated_rows, m - row);
    linear(team, gate_up, x + row * gate_up.k, rows, both);
    silu_mul(team, both, hidden, rows, dim);
    linear(team, down, hidden, rows, y + row * down.n, part_step);
  }
}

}  // namespace aserve
