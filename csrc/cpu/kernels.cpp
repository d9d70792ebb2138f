#include "kernels.h"

namespace aserve {

const Kernels& kernels() {
#if defined(__x86_64__)
  switch (level()) {
    case Level::amx:
    case Level::avx512:
      return kernels_avx512;
    case Level::avx2:
      return kernels_avx2;
    case Level::generic:
      break;
  }
#endif
  return kernels_generic;
}

}  // namespace aserve
