// The passes over a tree's candidates that choosing among them is made of. Private to csrc/cpu.
#pragma once

#include <cstdint>

namespace aserve {

struct KeyRange {
  int32_t low, high;
};

struct TreeKernels {
  // Keys of n scores, none above its parent's; false where a parent is not before its child.
  bool (*path_keys)(const float* scores, const int32_t* parents, int64_t n, int32_t* keys);
  KeyRange (*range)(const int32_t* keys, int64_t n);  // n > 0
  int64_t (*count)(const int32_t* keys, int64_t n, int32_t least);
  // Where keys >= least are, in order; returns how many. There is room for n and a line more.
  int64_t (*gather)(const int32_t* keys, int64_t n, int32_t least, int32_t* places);
};

extern const TreeKernels tree_generic;
extern const TreeKernels tree_avx512;

}  // namespace aserve
