// The matrix product on Ampere and Ada (CUTLASS 2: cp.async into shared memory, mma.sync out of it). One
// tile for every m, K not split: an output is summed over k in one order.
#include <cutlass/cutlass.h>

#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>

#include "gemm.h"

namespace aserve {
namespace {

using Element = cutlass::bfloat16_t;
using Gemm = cutlass::gemm::device::GemmUniversal<
    Element, cutlass::layout::RowMajor, Element, cutlass::layout::ColumnMajor, float,
    cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<64, 128, 32>, cutlass::gemm::GemmShape<32, 64, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<
        float, 4, float, float, cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 4, 8, 8>;

}  // namespace

int gemm_sm80(const aserve_gemm& call, void* stream) {
  const int64_t row = call.k * call.blocks;
  const typename Gemm::Arguments given(
      cutlass::gemm::GemmUniversalMode::kBatched,
      {static_cast<int>(call.m), static_cast<int>(call.n), static_cast<int>(call.k)},
      static_cast<int>(call.blocks), {1.0f}, call.x, call.w, call.parts, call.parts, call.k,
      call.k, call.m * call.n, call.m * call.n, row, row, call.n, call.n);
  Gemm gemm;
  cutlass::Status status = gemm.can_implement(given);
  if (status == cutlass::Status::kSuccess) {
    status = gemm(given, call.workspace, static_cast<cudaStream_t>(stream));
  }
  if (status == cutlass::Status::kSuccess) return cudaSuccess;
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : cudaErrorInvalidValue;
}

}  // namespace aserve
