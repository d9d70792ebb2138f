// The AVX2 level.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

// Everything below is compiled for this level and is static, so nothing of it can be merged with
// code that must run elsewhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ASERVE_LEVEL 1

namespace aserve {
#include "level.inc"

const Kernels kernels_avx2 = level_kernels;
}  // namespace aserve

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
