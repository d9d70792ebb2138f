// What a CUDA kernel knows of its block of threads. A kernel is a functor called with a Block, and is
// a sequence of phases: `each` runs a phase on every thread and then waits for all, `each_alone` does
// not wait. What a thread keeps from phase to phase is a Local; what warps do together (sums, matrix
// products) is a call on the Block. So the same lines run on a GPU, under nvcc, and on the host, under
// any C++17 compiler, where the threads of a phase take turns: CPU tests run what a GPU runs.
//
// Control flow outside the phases must be the same for all threads of a block.
#pragma once

#include <cstdint>

#include "aserve/index.h"

namespace aserve {

struct Grid {
  int64_t x, y = 1, z = 1;
  bool empty() const { return x <= 0 || y <= 0 || z <= 0; }
};

struct Add {
  template <class T>
  ASERVE_HD T operator()(T a, T b) const { return a + b; }
};
struct Larger {
  template <class T>
  ASERVE_HD T operator()(T a, T b) const { return b > a ? b : a; }
};
struct Smaller {
  template <class T>
  ASERVE_HD T operator()(T a, T b) const { return b < a ? b : a; }
};

// a / b for what is not negative: 64-bit division is a long routine on a GPU, and seldom needed.
ASERVE_HD int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// What a thread copies at once, at most.
struct Unit16 {
  uint64_t low, high;
};

// Two numbers of a thread, as its rows of a fragment are.
struct Two {
  float v[2];
};

}  // namespace aserve

#if defined(__CUDACC__)
#define ASERVE_DEVICE __device__ __forceinline__
#include "aserve/device_block.cuh"
#else
#define ASERVE_DEVICE inline
#include "aserve/host_block.cuh"
#endif
