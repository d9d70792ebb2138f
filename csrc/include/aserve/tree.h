// Trees of drafted rows, for every processor. `parents[row]` is the row above, before it in the
// tree; -1 at a root, which hangs below all that is committed. aserve/core/tree.py has the rules.
#pragma once

#include <cstdint>

#include "aserve/index.h"

namespace aserve {

// Whether `other` is `row` or above it.
ASERVE_HD bool is_on_path(const int32_t* parents, int32_t row, int32_t other) {
  while (row > other) row = parents[row];
  return row == other;
}

// Rows between a row and its root: its depth.
ASERVE_HD int32_t tree_depth(const int32_t* parents, int32_t row) {
  int32_t depth = 0;
  while ((row = parents[row]) >= 0) ++depth;
  return depth;
}

// The path that the model's own draws keep, from row 0 down: a row stays if the token drawn at its
// parent is its own, the first such child where drafts are equal. Returns the path's length; the
// token drawn at its last row comes next in the text. Row 0 is no draft and always stays.
ASERVE_HD int32_t accept_path(const int32_t* parents, const int32_t* tokens, const int32_t* drawn,
                              int32_t rows, int32_t* path) {
  if (rows == 0) return 0;
  int32_t length = 1;
  path[0] = 0;
  for (int32_t row = 1; row < rows; ++row) {
    const int32_t last = path[length - 1];
    if (parents[row] == last && tokens[row] == drawn[last]) path[length++] = row;
  }
  return length;
}

}  // namespace aserve
