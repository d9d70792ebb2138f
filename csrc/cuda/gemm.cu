// Which matrix product a device gets: TMA and WGMMA on 9.0, mma.sync on 8.x. No other, and no fallback.
#include "gemm.h"

#include <cuda_runtime.h>

extern "C" {

int aserve_cuda_gemm(const aserve_gemm* call, void* stream) {
  if (call->m == 0 || call->n == 0 || call->blocks == 0) return cudaSuccess;
  if (call->k == 0) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(call->blocks * call->m * call->n);
    return cudaMemsetAsync(call->parts, 0, bytes, static_cast<cudaStream_t>(stream));
  }
  const int capability = aserve_cuda_capability();
  if (capability < 0) return -capability;
  if (capability == 90) return aserve::gemm_sm90(*call, stream);
  if (capability / 10 == 8) return aserve::gemm_sm80(*call, stream);
  return cudaErrorNoKernelImageForDevice;
}

int64_t aserve_cuda_gemm_workspace(const aserve_gemm* call) {
  return aserve_cuda_capability() == 90 ? aserve::gemm_sm90_workspace(*call) : 0;
}

}  // extern "C"
