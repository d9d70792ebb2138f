// The two matrix products behind aserve_cuda_gemm; private to csrc/cuda. Both return a cudaError_t.
#pragma once

#include "aserve/cuda.cuh"

namespace aserve {

int gemm_sm90(const aserve_gemm& call, void* stream);
int64_t gemm_sm90_workspace(const aserve_gemm& call);
int gemm_sm80(const aserve_gemm& call, void* stream);

}  // namespace aserve
