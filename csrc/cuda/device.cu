// What device there is, and what an error means.
#include "aserve/cuda.cuh"

#if defined(__CUDACC__)

#include <cuda_runtime.h>

extern "C" {

int aserve_cuda_backend(void) { return 0; }

int aserve_cuda_devices(void) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -static_cast<int>(error);
}

int aserve_cuda_capability(void) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  return error == cudaSuccess ? major * 10 + minor : -static_cast<int>(error);
}

const char* aserve_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // extern "C"

#else

#include "aserve/thread_block.cuh"

extern "C" {

int aserve_cuda_backend(void) { return 1; }
int aserve_cuda_devices(void) { return 1; }
int aserve_cuda_capability(void) { return 90; }
const char* aserve_cuda_error(int) { return "the host backend has no errors"; }
// Threads and blocks take turns from the last to the first.
void aserve_host_backwards(int backwards) { aserve::host_backwards() = backwards != 0; }

}  // extern "C"

#endif
