// Trees of drafted rows, for every processor; aserve/core/tree.py has the rules.
#pragma once

#include <cstdint>

#include "aserve/index.h"

namespace aserve {

// How deep a place of a tree is on a path down from its root, -1 if it is not on it. The places of a
// path ascend.
ASERVE_HD int32_t depth_on_path(const int32_t* path, int32_t length, int32_t place) {
  int32_t low = 0, high = length;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (path[middle] < place) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < length && path[low] == place ? low : -1;
}

// The path that the model's own draws keep of rows whose `parents` come before them (-1 at the root),
// from row 0 down: a row stays if the token drawn at its parent is its own, the first such child where
// drafts are equal. Returns the path's length; the token drawn at its last row comes next in the text.
// Row 0 is no draft and always stays.
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
