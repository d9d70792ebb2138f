// The plain level: no instruction beyond the compiler's baseline.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"

#define ASERVE_LEVEL 0

namespace aserve {
#include "level.inc"

const Kernels kernels_generic = level_kernels;
}  // namespace aserve
