// Stands in for CUTLASS in the host build of the kernels: the same product, one output at a time.
#include <cmath>

#include "aserve/cuda.cuh"
#include "aserve/number.h"

extern "C" {

int aserve_cuda_gemm(const aserve_gemm* call, void*) {
  const int64_t row = call->k * call->blocks;
  for (int64_t block = 0; block < call->blocks; ++block) {
    for (int64_t m = 0; m < call->m; ++m) {
      for (int64_t n = 0; n < call->n; ++n) {
        const uint16_t* x = call->x + m * row + block * call->k;
        const uint16_t* w = call->w + n * row + block * call->k;
        float sum = 0;
        for (int64_t k = 0; k < call->k; ++k) {
          sum = std::fma(aserve::widen(x[k]), aserve::widen(w[k]), sum);
        }
        call->parts[(block * call->m + m) * call->n + n] = sum;
      }
    }
  }
  return 0;
}

int64_t aserve_cuda_gemm_workspace(const aserve_gemm*) { return 0; }

}  // extern "C"
