// The matrix product on Hopper (CUTLASS 3: TMA into shared memory, WGMMA out of it). Outputs of the
// weight are the long side of the tile, rows of x the other, so a few rows waste only columns. One tile
// for every m, no split of K by occupancy: an output is summed over k in one order.
#include <cutlass/cutlass.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "gemm.h"

namespace aserve {
namespace {

using cute::_1;
using cute::_128;
using cute::_64;
using Element = cutlass::bfloat16_t;
using Tile = cute::Shape<_128, _128, _64>;  // outputs, rows, k
using Cluster = cute::Shape<_1, _1, _1>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
    cutlass::layout::ColumnMajor, 4, float, cutlass::layout::ColumnMajor, 4,
    cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8,
    Element, cutlass::layout::ColumnMajor, 8, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

int multiprocessors() {
  constexpr int devices_max = 64;
  static int known[devices_max] = {};  // a race writes the same number twice
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= devices_max) return 0;
  if (known[device] == 0) {
    cudaDeviceGetAttribute(&known[device], cudaDevAttrMultiProcessorCount, device);
  }
  return known[device];
}

typename Gemm::Arguments arguments(const aserve_gemm& call) {
  const int n = static_cast<int>(call.n), m = static_cast<int>(call.m);
  const int k = static_cast<int>(call.k), blocks = static_cast<int>(call.blocks);
  const int64_t row = call.k * call.blocks;
  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = multiprocessors();
  return {cutlass::gemm::GemmUniversalMode::kGemm,
          {n, m, k, blocks},
          {reinterpret_cast<const Element*>(call.w), {row, _1{}, call.k},
           reinterpret_cast<const Element*>(call.x), {row, _1{}, call.k}},
          {{}, nullptr, {_1{}, call.n, call.m * call.n}, call.parts,
           {_1{}, call.n, call.m * call.n}},
          hardware};
}

int error_of(cutlass::Status status) {
  if (status == cutlass::Status::kSuccess) return cudaSuccess;
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const bool asked_wrong = status == cutlass::Status::kErrorInvalidProblem ||
                           status == cutlass::Status::kErrorMisalignedOperand;
  return asked_wrong ? cudaErrorInvalidValue : cudaErrorUnknown;
}

}  // namespace

int gemm_sm90(const aserve_gemm& call, void* stream) {
  Gemm gemm;
  const typename Gemm::Arguments given = arguments(call);
  cutlass::Status status = gemm.can_implement(given);
  if (status != cutlass::Status::kSuccess) return error_of(status);
  if (static_cast<int64_t>(Gemm::get_workspace_size(given)) > call.workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  status = gemm.run(given, call.workspace, static_cast<cudaStream_t>(stream));
  return error_of(status);
}

int64_t gemm_sm90_workspace(const aserve_gemm& call) {
  return static_cast<int64_t>(Gemm::get_workspace_size(arguments(call)));
}

}  // namespace aserve
