// Passes over candidates in plain C++.
#include <algorithm>

#include "aserve/tree.h"
#include "tree_kernels.h"

namespace aserve {
namespace {

bool path_keys(const float* scores, const int32_t* parents, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; ++i) keys[i] = score_key(scores[i]);
  bool good = true;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t parent = parents[i];
    if (parent == -1) continue;
    if (parent < -1 || parent >= i) {
      good = false;
    } else {
      keys[i] = std::min(keys[i], keys[parent]);
    }
  }
  return good;
}

KeyRange range(const int32_t* keys, int64_t n) {
  int32_t low = keys[0], high = keys[0];
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, keys[i]);
    high = std::max(high, keys[i]);
  }
  return {low, high};
}

int64_t count(const int32_t* keys, int64_t n, int32_t least) {
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) found += keys[i] >= least;
  return found;
}

int64_t gather(const int32_t* keys, int64_t n, int32_t least, int32_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    places[found] = static_cast<int32_t>(i);
    found += keys[i] >= least;
  }
  return found;
}

}  // namespace

const TreeKernels tree_generic = {path_keys, range, count, gather};

}  // namespace aserve
