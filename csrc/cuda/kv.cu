// Moving rows in and out of pages. Copies are of whole tokens or heads as bytes, a warp for each row,
// in the widest unit that addresses and strides allow.
#include <cfloat>

#include "aserve/context_parallel.h"
#include "aserve/cuda.cuh"
#include "aserve/number.h"
#include "aserve/thread_block.cuh"

namespace aserve {

// A warp for each row, head, and of k and v.
struct Append {
  static constexpr int threads = 128;
  aserve_pages pages;
  aserve_append call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const bool is_k = block.y() == 0;
    const int64_t dim = pages.dim, first = block.x() * B::warps;
    const float* x = is_k ? call.k : call.v;
    const int64_t x_stride = is_k ? call.k_stride : call.v_stride;
    const PageShape shape = {pages.pages, pages.page_size, pages.heads, pages.head_len,
                             is_k ? pages.k_stride : pages.v_stride};
    const auto is_there = [&](int64_t at) {
      if (at >= call.rows * pages.heads) return false;
      const int32_t slot = call.slots[quotient(at, pages.heads)];
      return slot >= 0 && slot < pages.pages * pages.page_size;
    };
    const auto head_at = [&](int64_t row, int64_t head) { return x + row * x_stride + head * dim; };
    typename B::template Local<float> most(block);
    if (pages.type == 2) {
      block.each_alone([&](int t) {
        const int64_t at = first + t / 32, row = quotient(at, pages.heads);
        most[t] = 0;
        if (!is_there(at)) return;
        const float* from = head_at(row, at - row * pages.heads);
        for (int64_t i = t % 32; i < dim; i += 32) {
          // What is not finite makes a scale of NaN and values of zero.
          const float size = fabsf(from[i]);
          most[t] = size <= FLT_MAX ? Larger()(most[t], size) : INFINITY;
        }
      });
      block.reduce_warps(most, Larger());
    }
    block.each_alone([&](int t) {
      const int64_t at = first + t / 32, row = quotient(at, pages.heads), head = at - row * pages.heads;
      if (!is_there(at)) return;
      const float* from = head_at(row, head);
      const int64_t to = slot_offset(shape, call.slots[row]) + head * pages.head_len;
      void* pool = is_k ? pages.k : pages.v;
      if (pages.type == 2) {
        const bool finite = most[t] < INFINITY;
        const float scale = finite ? most[t] / 127.0f : NAN;
        int8_t* at_head = static_cast<int8_t*>(pool) + to;
        for (int64_t i = t % 32; i < dim; i += 32) {
          at_head[i] = scale > 0 ? static_cast<int8_t>(rintf(from[i] / scale)) : int8_t(0);
        }
        if (t % 32 == 0) *reinterpret_cast<float*>(at_head + dim) = scale;
      } else if (pages.type == 1) {
        for (int64_t i = t % 32; i < dim; i += 32) {
          static_cast<uint16_t*>(pool)[to + i] = narrow(from[i]);
        }
      } else {
        for (int64_t i = t % 32; i < dim; i += 32) static_cast<float*>(pool)[to + i] = from[i];
      }
    });
  }
};

// Where row i starts, in bytes; negative: nowhere.
struct Plain {
  int64_t stride;
  ASERVE_HD int64_t operator()(int64_t i) const { return i * stride; }
};
struct Indexed {
  int64_t stride;
  const int32_t* index;
  ASERVE_HD int64_t operator()(int64_t i) const { return index[i] * stride; }
};
struct Slots {
  PageShape shape;  // in bytes
  const int32_t* slots;
  ASERVE_HD int64_t operator()(int64_t i) const {
    const int64_t slot = slots[i];
    const bool is_there = slot >= 0 && slot < shape.pages * shape.page_size;
    return is_there ? slot_offset(shape, slot) : -1;
  }
};
struct Places {
  PageShape shape;  // in bytes
  const int32_t* pages;
  int64_t begin, head;
  ASERVE_HD int64_t operator()(int64_t i) const {
    return token_offset(shape, pages, begin + i) + head * shape.dim;
  }
};

template <class Unit, class From, class To>
struct CopyRows {
  static constexpr int threads = 128;
  const char* from;
  char* to;
  From from_row;
  To to_row;
  int64_t rows, units;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    block.each_alone([&](int t) {
      const int64_t row = block.x() * B::warps + t / 32;
      if (row >= rows) return;
      const int64_t source = from_row(row), target = to_row(row);
      if (source < 0 || target < 0) return;
      const Unit* x = reinterpret_cast<const Unit*>(from + source);
      Unit* y = reinterpret_cast<Unit*>(to + target);
      for (int64_t i = t % 32; i < units; i += 32) y[i] = x[i];
    });
  }
};

// `alignment` has every bit set that an address, stride or length has.
template <class From, class To>
int copy_rows(const void* from, void* to, const From& from_row, const To& to_row, int64_t rows,
              int64_t row_bytes, int64_t alignment, void* stream) {
  const char* x = static_cast<const char*>(from);
  char* y = static_cast<char*>(to);
  const int64_t bits = alignment | row_bytes | reinterpret_cast<intptr_t>(from) |
                       reinterpret_cast<intptr_t>(to);
  const Grid grid = {row_bytes > 0 ? ceil_div(rows, 4) : 0};
  if (bits % 16 == 0) {
    return launch(CopyRows<Unit16, From, To>{x, y, from_row, to_row, rows, row_bytes / 16}, grid, 0,
                  stream);
  }
  if (bits % 4 == 0) {
    return launch(CopyRows<uint32_t, From, To>{x, y, from_row, to_row, rows, row_bytes / 4}, grid,
                  0, stream);
  }
  return launch(CopyRows<uint8_t, From, To>{x, y, from_row, to_row, rows, row_bytes}, grid, 0,
                stream);
}

// A block for each sequence.
struct CpIndex {
  static constexpr int threads = 128;
  aserve_cp_index call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t n = block.x(), start = call.starts[n], length = call.lengths[n];
    const CpRank rank = {static_cast<CpKind>(call.kind), call.cp, call.rank};
    const int64_t count = cp_count(rank, start, length);
    block.each_alone([&](int t) {
      for (int64_t i = t; i < count; i += B::threads) {
        call.rows[call.places[n] + i] = static_cast<int32_t>(cp_row(rank, start, length, i));
      }
    });
  }
};

}  // namespace aserve

extern "C" {

int aserve_cuda_kv_append(const aserve_pages* pages, const aserve_append* call, void* stream) {
  using namespace aserve;
  return launch(Append{*pages, *call}, {ceil_div(call->rows * pages->heads, 4), 2}, 0, stream);
}

int aserve_cuda_kv_gather(const aserve_tokens* call, void* stream) {
  using namespace aserve;
  const PageShape shape = {call->pages, call->page_size, call->heads, call->head_bytes,
                           call->page_stride};
  const int64_t bytes = call->heads * call->head_bytes;
  return copy_rows(call->pool, call->rows_at, Slots{shape, call->slots}, Plain{bytes}, call->rows,
                   bytes, call->page_stride, stream);
}

int aserve_cuda_kv_scatter(const aserve_tokens* call, void* stream) {
  using namespace aserve;
  const PageShape shape = {call->pages, call->page_size, call->heads, call->head_bytes,
                           call->page_stride};
  const int64_t bytes = call->heads * call->head_bytes;
  return copy_rows(call->rows_at, call->pool, Plain{bytes}, Slots{shape, call->slots}, call->rows,
                   bytes, call->page_stride, stream);
}

int aserve_cuda_kv_copy(const aserve_kv_copy* call, void* stream) {
  using namespace aserve;
  const PageShape from = {0, call->from_page_size, call->from_heads, call->head_bytes,
                          call->from_stride};
  const PageShape to = {0, call->to_page_size, call->to_heads, call->head_bytes, call->to_stride};
  return copy_rows(call->from, call->to,
                   Places{from, call->from_pages, call->begin, call->from_head},
                   Places{to, call->to_pages, call->begin, call->to_head}, call->end - call->begin,
                   call->heads * call->head_bytes,
                   call->head_bytes | call->from_stride | call->to_stride, stream);
}

int aserve_cuda_gather_rows(const aserve_rows* call, void* stream) {
  using namespace aserve;
  return copy_rows(call->x, call->out, Indexed{call->x_stride, call->index},
                   Plain{call->row_bytes}, call->rows, call->row_bytes, call->x_stride, stream);
}

int aserve_cuda_scatter_rows(const aserve_rows* call, void* stream) {
  using namespace aserve;
  return copy_rows(call->x, call->out, Plain{call->x_stride},
                   Indexed{call->row_bytes, call->index}, call->rows, call->row_bytes,
                   call->x_stride, stream);
}

int aserve_cuda_cp_index(const aserve_cp_index* call, void* stream) {
  return aserve::launch(aserve::CpIndex{*call}, {call->sequences}, 0, stream);
}

}  // extern "C"
