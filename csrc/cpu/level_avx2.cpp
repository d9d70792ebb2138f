// The AVX2 level.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AVX2)
#define ASERVE_LEVEL 1

namespace aserve {
#include "level.inc"

const Kernels kernels_avx2 = level_kernels;
}  // namespace aserve

ASERVE_TARGET_END
#endif
