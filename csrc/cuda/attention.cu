// Paged attention on tensor cores, for decode, chunks and draft trees alike: a tile of lanes goes over
// the keys it sees in blocks of 64 (of 32 if dim > 64: registers), in splits of 256. A split's sums start from zero and are added to
// those before it, in order, by the block itself or, shared out, by Merge: the same additions.
#include "aserve/cuda.cuh"
#include "aserve/flash_kernel.cuh"
#include "aserve/flash_tile.cuh"
#include "aserve/thread_block.cuh"

namespace aserve {

// Adds the splits of one row, four heads to a block, in order.
struct Merge {
  static constexpr int threads = 128;
  aserve_pages pages;
  aserve_attend call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t row = block.x(), dim = pages.dim;
    block.each_alone([&](int t) {
      const int64_t head = block.y() * B::warps + t / 32;
      if (head >= call.heads) return;
      const int64_t owner = sequence_of(row);
      const FlashSequence sequence = sequence_at(call, owner);
      const int32_t own = static_cast<int32_t>(row - call.row_start[owner]);
      const FlashRange range = flash_range(sequence, own, own);
      const float* sink = call.sinks == nullptr ? nullptr : call.sinks + head;
      float* out = call.out + (row * call.heads + head) * dim;
      const int64_t first = range.begin / flash_split, last = ceil_div(range.end, flash_split);
      for (int64_t d = t % 32; d < dim; d += 32) {
        Soft soft = {-INFINITY, 0.0f};
        float total = 0.0f;
        for (int64_t split = first; split < last; ++split) {
          const float* part = partial_at(call, dim, row, head, split);
          total = add_scaled(total, part[d], soften(soft, {part[dim], part[dim + 1]}));
        }
        out[d] = total * soft_factor(soft, sink);
      }
    });
  }

  // The sequence whose rows include `row`; those without rows are passed over.
  ASERVE_DEVICE int64_t sequence_of(int64_t row) const {
    int64_t low = 0, high = call.sequences;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (call.row_start[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

template <int Dim, bool Wide, int Warps, bool Split>
int launch_flash(const aserve_pages& pages, const aserve_attend& call, void* stream) {
  using Kernel = Flash<Dim, Wide, Warps, Split>;
  const int64_t group = call.heads / pages.heads;
  const int64_t tiles = call.rows * group / (Warps * 16) + call.sequences;
  const Kernel kernel = {pages, call};
  const int error = launch(kernel, {tiles, pages.heads, Split ? call.splits : 1},
                           Kernel::shared_bytes, stream);
  if (error != 0 || !Split) return error;
  return launch(Merge{pages, call}, {call.rows, ceil_div(call.heads, 4)}, 0, stream);
}

template <int Dim, bool Wide>
int launch_by_rows(const aserve_pages& pages, const aserve_attend& call, void* stream) {
  if (call.partials != nullptr) return launch_flash<Dim, Wide, 1, true>(pages, call, stream);
  return launch_flash<Dim, Wide, 4, false>(pages, call, stream);
}

}  // namespace aserve

extern "C" int aserve_cuda_attention(const aserve_pages* pages, const aserve_attend* call,
                                     void* stream) {
  using namespace aserve;
  if (call->rows == 0 || call->sequences == 0) return 0;
  if (pages->type == 2) {
    return pages->dim <= 64 ? launch_by_rows<64, false>(*pages, *call, stream)
                            : launch_by_rows<128, false>(*pages, *call, stream);
  }
  return pages->dim <= 64 ? launch_by_rows<64, true>(*pages, *call, stream)
                          : launch_by_rows<128, true>(*pages, *call, stream);
}
