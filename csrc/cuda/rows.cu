// Operations on one row at a time: norm, rope, gated activation, embedding, rounding, sums of parts.
#include "aserve/cuda.cuh"
#include "aserve/number.h"
#include "aserve/thread_block.cuh"

namespace aserve {

// A warp for each row and head, for rows that a warp reads in a few loads.
struct NormHeads {
  static constexpr int threads = 128;
  aserve_norm call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t first = block.x() * B::warps, all = call.rows * call.heads;
    typename B::template Local<float> squares(block);
    block.each_alone([&](int t) {
      squares[t] = 0;
      const int64_t at = first + t / 32, row = quotient(at, call.heads);
      if (at >= all) return;
      const float* x = call.x + row * call.x_stride + (at - row * call.heads) * call.dim;
      for (int64_t i = t % 32; i < call.dim; i += 32) {
        float value = x[i];
        if (call.residual != nullptr) {
          value += call.residual[at * call.dim + i];
          call.total[at * call.dim + i] = value;
        }
        squares[t] = fmaf(value, value, squares[t]);
      }
    });
    block.reduce_warps(squares, Add());
    block.each_alone([&](int t) {
      const int64_t at = first + t / 32, row = quotient(at, call.heads);
      if (at >= all) return;
      const float scale = 1.0f / sqrtf(squares[t] / static_cast<float>(call.dim) + call.eps);
      const float* x = call.residual != nullptr
                           ? call.total + at * call.dim
                           : call.x + row * call.x_stride + (at - row * call.heads) * call.dim;
      for (int64_t i = t % 32; i < call.dim; i += 32) {
        const float y = x[i] * scale * call.weight[i];
        if (call.y != nullptr) call.y[at * call.dim + i] = y;
        if (call.y_bf16 != nullptr) call.y_bf16[at * call.dim + i] = narrow(y);
      }
    });
  }
};

// A block for each row of the model's width.
struct NormRow {
  static constexpr int threads = 256;
  aserve_norm call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t row = block.x(), dim = call.dim;
    const float* x = call.x + row * call.x_stride;
    typename B::template Local<float> squares(block);
    block.each_alone([&](int t) {
      squares[t] = 0;
      for (int64_t i = t; i < dim; i += B::threads) {
        float value = x[i];
        if (call.residual != nullptr) {
          value += call.residual[row * dim + i];
          call.total[row * dim + i] = value;
        }
        squares[t] = fmaf(value, value, squares[t]);
      }
    });
    const float mean = block.reduce(squares, Add()) / static_cast<float>(dim);
    const float scale = 1.0f / sqrtf(mean + call.eps);
    const float* from = call.residual != nullptr ? call.total + row * dim : x;
    block.each_alone([&](int t) {  // each thread reads what it wrote itself
      for (int64_t i = t; i < dim; i += B::threads) {
        const float y = from[i] * scale * call.weight[i];
        if (call.y != nullptr) call.y[row * dim + i] = y;
        if (call.y_bf16 != nullptr) call.y_bf16[row * dim + i] = narrow(y);
      }
    });
  }
};

struct Rope {
  static constexpr int threads = 128;
  aserve_rope call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t first = block.x() * B::warps, heads = call.q_heads + call.k_heads;
    const int64_t all = call.rows * heads, half = call.rot / 2;
    typename B::template Local<float> squares(block);
    const auto head_of = [&](int64_t row, int64_t head) {
      return head < call.q_heads
                 ? call.q + row * call.q_stride + head * call.dim
                 : call.k + row * call.k_stride + (head - call.q_heads) * call.dim;
    };
    if (call.q_weight != nullptr || call.k_weight != nullptr) {
      block.each_alone([&](int t) {
        squares[t] = 0;
        const int64_t at = first + t / 32, row = quotient(at, heads);
        if (at >= all) return;
        const float* x = head_of(row, at - row * heads);
        for (int64_t i = t % 32; i < call.dim; i += 32) squares[t] = fmaf(x[i], x[i], squares[t]);
      });
      block.reduce_warps(squares, Add());
      block.each([&](int t) {
        const int64_t at = first + t / 32, row = quotient(at, heads), head = at - row * heads;
        const float* weight = head < call.q_heads ? call.q_weight : call.k_weight;
        if (at >= all || weight == nullptr) return;
        const float scale = 1.0f / sqrtf(squares[t] / static_cast<float>(call.dim) + call.eps);
        float* x = head_of(row, head);
        for (int64_t i = t % 32; i < call.dim; i += 32) x[i] = x[i] * scale * weight[i];
      });
    }
    block.each_alone([&](int t) {
      const int64_t at = first + t / 32, row = quotient(at, heads);
      if (at >= all) return;
      const float* cos = call.cos_sin + call.positions[row] * call.rot;
      float* x = head_of(row, at - row * heads);
      for (int64_t i = t % 32; i < half; i += 32) {
        const float a = x[i], b = x[half + i], c = cos[i], s = cos[half + i];
        x[i] = a * c - b * s;
        x[half + i] = b * c + a * s;
      }
    });
  }
};

// Elements by themselves: `Work` is called with each number below n.
template <class Work>
struct Elements {
  static constexpr int threads = 256;
  static constexpr int64_t each = 4;  // of a thread
  Work work;
  int64_t n;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    block.each_alone([&](int t) {
      const int64_t first = block.x() * threads * each + t;
      for (int64_t i = 0; i < each; ++i) {
        if (first + i * threads < n) work(first + i * threads);
      }
    });
  }
};

template <class Work>
int launch_elements(const Work& work, int64_t n, void* stream) {
  return launch(Elements<Work>{work, n}, {ceil_div(n, 1024)}, 0, stream);
}

struct AddOne {
  const float *x, *y;
  float* out;
  ASERVE_DEVICE void operator()(int64_t i) const { out[i] = x[i] + y[i]; }
};

struct SiluMulOne {
  aserve_silu_mul call;
  ASERVE_DEVICE void operator()(int64_t i) const {
    const int64_t row = quotient(i, call.dim);
    const float gate = call.gate_up[i + row * call.dim];
    const float up = call.gate_up[i + (row + 1) * call.dim];
    const float out = gate / (1.0f + expf(-gate)) * up;
    if (call.out != nullptr) call.out[i] = out;
    if (call.out_bf16 != nullptr) call.out_bf16[i] = narrow(out);
  }
};

struct EmbedOne {
  aserve_embed call;
  ASERVE_DEVICE void operator()(int64_t i) const {
    const int64_t row = quotient(i, call.dim), id = call.ids[row];
    const int64_t at = id * call.dim + i - row * call.dim;
    if (id < 0 || id >= call.vocab) {
      call.out[i] = NAN;
    } else if (call.type == 1) {
      call.out[i] = widen(static_cast<const uint16_t*>(call.table)[at]);
    } else {
      call.out[i] = static_cast<const float*>(call.table)[at];
    }
  }
};

struct NarrowOne {
  aserve_narrow call;
  ASERVE_DEVICE void operator()(int64_t i) const {
    const int64_t part = quotient(i, call.k_pad), k = i - part * call.k_pad, step = call.k / call.blocks;
    const int64_t row = quotient(part, call.blocks), block = part - row * call.blocks;
    call.out[i] = k < step ? narrow(call.x[row * call.x_stride + block * step + k]) : uint16_t(0);
  }
};

struct SumOne {
  aserve_sum call;
  ASERVE_DEVICE void operator()(int64_t i) const {
    const int64_t row = quotient(i, call.n), column = i - row * call.n;
    const float* part = call.parts + row * call.n_pad + column;
    float total = part[0];
    for (int64_t block = 1; block < call.blocks; ++block) {
      total += part[block * call.m * call.n_pad];
    }
    call.y[i] = call.bias == nullptr ? total : total + call.bias[column];
  }
};

}  // namespace aserve

extern "C" {

int aserve_cuda_rms_norm(const aserve_norm* call, void* stream) {
  using namespace aserve;
  // By the width alone, so that a row's sum never takes another order.
  if (call->heads == 1 && call->dim > 512) {
    return launch(NormRow{*call}, {call->rows}, 0, stream);
  }
  return launch(NormHeads{*call}, {ceil_div(call->rows * call->heads, 4)}, 0, stream);
}

int aserve_cuda_rope(const aserve_rope* call, void* stream) {
  using namespace aserve;
  const int64_t heads = call->rows * (call->q_heads + call->k_heads);
  return launch(Rope{*call}, {ceil_div(heads, 4)}, 0, stream);
}

int aserve_cuda_add(const float* x, const float* y, float* out, int64_t n, void* stream) {
  return aserve::launch_elements(aserve::AddOne{x, y, out}, n, stream);
}

int aserve_cuda_silu_mul(const aserve_silu_mul* call, void* stream) {
  return aserve::launch_elements(aserve::SiluMulOne{*call}, call->rows * call->dim, stream);
}

int aserve_cuda_embed(const aserve_embed* call, void* stream) {
  return aserve::launch_elements(aserve::EmbedOne{*call}, call->rows * call->dim, stream);
}

int aserve_cuda_narrow(const aserve_narrow* call, void* stream) {
  const int64_t n = call->rows * call->blocks * call->k_pad;
  return aserve::launch_elements(aserve::NarrowOne{*call}, n, stream);
}

int aserve_cuda_sum_parts(const aserve_sum* call, void* stream) {
  return aserve::launch_elements(aserve::SumOne{*call}, call->m * call->n, stream);
}

}  // extern "C"
