// What the model's draws keep of the trees that were drafted, and which KV moves for it.
#include "aserve/cuda.cuh"
#include "aserve/thread_block.cuh"
#include "aserve/tree.h"

namespace aserve {

// A thread for each tree: trees have tens of rows, and the walk is one pass over them.
struct Accept {
  static constexpr int threads = 32;
  aserve_accept call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    block.each_alone([&](int t) {
      const int64_t n = block.x() * threads + t;
      if (n >= call.n) return;
      const int32_t begin = call.row_start[n], rows = call.row_start[n + 1] - begin;
      int32_t* path = call.path + begin;
      const int32_t length = accept_path(call.parents + begin, call.tokens + begin,
                                         call.drawn + begin, rows, path);
      call.lengths[n] = length;
      call.next[n] = length > 0 ? call.drawn[begin + path[length - 1]] : -1;
      if (call.slots == nullptr) return;
      for (int32_t i = 0; i < rows; ++i) {
        const bool moves = i < length && path[i] != i;
        call.from_slots[begin + i] = moves ? call.slots[begin + path[i]] : -1;
        call.to_slots[begin + i] = moves ? call.slots[begin + i] : -1;
      }
    });
  }
};

}  // namespace aserve

extern "C" int aserve_cuda_accept(const aserve_accept* call, void* stream) {
  return aserve::launch(aserve::Accept{*call}, {aserve::ceil_div(call->n, 32)}, 0, stream);
}
