// Sharing out rows of little work. Private to csrc/cpu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aserve/index.h"
#include "aserve/team.h"

namespace aserve {

// Elements below which another thread costs more than it saves.
constexpr int64_t elements_task = 8192;

// Calls work(begin, end) over [0, rows) in even pieces of at least elements_task.
template <class Work>
void share_rows(Team& team, int64_t rows, int64_t row_elements, const Work& work) {
  const int64_t pieces = std::max<int64_t>(1, rows * row_elements / elements_task);
  const int64_t step = ceil_div(std::max<int64_t>(1, rows), pieces);
  team.run(ceil_div(rows, step),
           [&](int64_t i) { work(i * step, std::min(rows, (i + 1) * step)); });
}

}  // namespace aserve
