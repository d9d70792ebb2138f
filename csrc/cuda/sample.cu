// Drawing the next token of each row, a block for each, in the order of sample.h and with its noise: the
// token is the one that csrc/cpu/sample.cpp draws, unless a mass falls on the edge of top_p closer than
// 2^-40 of the best token's, or two scores differ by less than the libraries' last bits.
#include <cfloat>

#include "aserve/cuda.cuh"
#include "aserve/noise.h"
#include "aserve/radix.cuh"
#include "aserve/sample.h"
#include "aserve/threshold.h"
#include "aserve/thread_block.cuh"

namespace aserve {

constexpr int sample_threads = 512;
constexpr int top_n_max = 128;

struct Finite {
  float max;
  bool is_number;  // neither NaN nor +inf is among them
};

template <class B>
ASERVE_DEVICE Finite extent(B& block, const float* x, int64_t n) {
  typename B::template Local<float> most(block);
  typename B::template Local<int32_t> bad(block);
  block.each_alone([&](int t) {
    most[t] = -INFINITY;
    bad[t] = 0;
    for (int64_t i = t; i < n; i += B::threads) {
      if (x[i] != x[i] || x[i] == INFINITY) bad[t] = 1;
      if (x[i] > most[t]) most[t] = x[i];
    }
  });
  const float max = block.reduce(most, Larger());
  return {max, block.reduce(bad, Larger()) == 0};
}

// A token's share of the mass: exp((x - max) * scale), in units of 2^-40.
ASERVE_HD uint64_t mass_of(float x, float max, double scale) {
  if (x == -INFINITY) return 0;
  return static_cast<uint64_t>(exp((static_cast<double>(x) - max) * scale) * 0x1p40 + 0.5);
}

struct Draw {
  static constexpr int threads = sample_threads;
  aserve_draw call;

  // Logits after mask, bias, penalties and bans: the row's own if nothing changes them.
  template <class B>
  ASERVE_DEVICE const float* edit(B& block, const aserve_draw_row& row, const float* x,
                                  float* y) const {
    const bool penalties = row.repetition != 1 || row.frequency != 0 || row.presence != 0;
    const bool counted = penalties && row.seen_n > 0;
    if (row.mask == nullptr && row.bias_n == 0 && !counted && row.banned_n == 0) return x;
    const int64_t vocab = call.vocab;
    const auto is_inside = [vocab](int32_t id) { return id >= 0 && id < vocab; };
    block.each([&](int t) {
      for (int64_t i = t; i < vocab; i += threads) {
        const bool allowed = row.mask == nullptr || (row.mask[i / 32] >> (i % 32) & 1);
        y[i] = allowed ? x[i] : -INFINITY;
      }
    });
    block.each([&](int t) {
      for (int64_t i = t; i < row.bias_n; i += threads) {
        const int32_t id = row.bias_ids[i];
        if (is_inside(id)) y[id] = static_cast<float>(y[id] + row.bias[i]);
      }
    });
    block.each([&](int t) {
      for (int64_t i = t; counted && i < row.seen_n; i += threads) {
        const int32_t id = row.seen_ids[i];
        if (!is_inside(id)) continue;
        double logit = y[id];
        logit = logit > 0 ? logit / row.repetition : logit * row.repetition;
        if (row.seen[i] > 0) logit = logit - row.frequency * row.seen[i] - row.presence;
        y[id] = static_cast<float>(logit);
      }
    });
    block.each([&](int t) {
      for (int64_t i = t; i < row.banned_n; i += threads) {
        if (is_inside(row.banned[i])) y[row.banned[i]] = -INFINITY;
      }
    });
    return y;
  }

  template <class B>
  ASERVE_DEVICE float threshold(B& block, const aserve_draw_row& row, const float* x,
                                float max) const {
    const double scale = 1.0 / row.temperature;
    float least = -FLT_MAX;
    if (row.top_k > 0 && row.top_k < call.vocab) {
      const float kth = mass_threshold(block, block.shared, x, call.vocab,
                                       static_cast<uint64_t>(row.top_k),
                                       [](float value) { return uint64_t(value != -INFINITY); });
      least = kth > least ? kth : least;
    }
    if (row.top_p < 1) {
      const float floor = least;
      const auto mass = [=](float value) {
        return value >= floor ? mass_of(value, max, scale) : uint64_t(0);
      };
      typename B::template Local<uint64_t> sums(block);
      block.each_alone([&](int t) {
        sums[t] = 0;
        for (int64_t i = t; i < call.vocab; i += threads) sums[t] += mass(x[i]);
      });
      const double whole = static_cast<double>(block.reduce(sums, Add()));
      const double wanted = ceil(row.top_p * whole);
      const float edge = mass_threshold(block, block.shared, x, call.vocab,
                                        wanted < 1 ? 1 : static_cast<uint64_t>(wanted), mass);
      least = edge > least ? edge : least;
    }
    if (row.min_p > 0) {
      const float edge = min_p_threshold(max, scale, row.min_p);
      least = edge > least ? edge : least;
    }
    return least;
  }

  template <class B>
  ASERVE_DEVICE int64_t best(B& block, const aserve_draw_row& row, const float* x, float max,
                             float least) const {
    const double scale = 1.0 / row.temperature;
    typename B::template Local<double> scores(block);
    typename B::template Local<int64_t> ids(block);
    block.each_alone([&](int t) {
      double top = -INFINITY;
      int64_t winner = call.vocab;
      for (int64_t i = t; i < call.vocab; i += threads) {
        if (!(x[i] >= least)) continue;
        const double logit = (static_cast<double>(x[i]) - max) * scale;
        const uint32_t bits = noise_bits(row.key, static_cast<uint32_t>(i));
        if (logit + gumbel_bound(bits) < top) continue;
        const double score = logit + gumbel_noise(bits);
        if (score > top) top = score, winner = i;
      }
      scores[t] = top;
      ids[t] = winner;
    });
    return first_best(block, scores, ids);
  }

  // The least id among the threads with the best score.
  template <class B, class Scores, class Ids>
  ASERVE_DEVICE int64_t first_best(B& block, Scores& scores, Ids& ids) const {
    typename B::template Local<double> copy(block);
    block.each_alone([&](int t) { copy[t] = scores[t]; });
    const double top = block.reduce(copy, Larger());
    block.each_alone([&](int t) {
      if (scores[t] < top) ids[t] = call.vocab;
    });
    return block.reduce(ids, Smaller());
  }

  template <class B>
  ASERVE_DEVICE int64_t first_equal(B& block, const float* x, float value) const {
    typename B::template Local<int64_t> ids(block);
    block.each_alone([&](int t) {
      int64_t i = t;
      while (i < call.vocab && x[i] != value) i += threads;
      ids[t] = i < call.vocab ? i : call.vocab;
    });
    return block.reduce(ids, Smaller());
  }

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t n = block.x();
    const aserve_draw_row& row = call.rows[n];
    const float* raw = call.logits + n * call.logits_stride;
    const float* x = edit(block, row, raw, call.edited + n * call.vocab);
    const Finite before = extent(block, raw, call.vocab);
    const Finite after = x == raw ? before : extent(block, x, call.vocab);
    Drawn status = Drawn::token;
    int64_t token = -1;
    if (!before.is_number || !after.is_number) {
      status = Drawn::not_a_number;
    } else if (after.max == -INFINITY) {
      status = Drawn::none_left;
    } else if (row.temperature < 1e-5) {  // greedy, as in csrc/cpu/sample.cpp
      token = first_equal(block, x, after.max);
    } else {
      token = best(block, row, x, after.max, threshold(block, row, x, after.max));
    }
    block.each_alone([&](int t) {
      if (t != 0) return;
      call.status[n] = static_cast<int32_t>(status);
      call.token[n] = static_cast<int32_t>(token);
    });
  }
};

struct Logprobs {
  static constexpr int threads = sample_threads;
  static constexpr int64_t shared_bytes = radix_bytes + 16 + top_n_max * 4;
  aserve_logprobs call;

  // Ids of the top_n best in shared memory, in no order; returns how many.
  template <class B>
  ASERVE_DEVICE int64_t gather_best(B& block, const float* x, int32_t* ids) const {
    uint64_t* count = reinterpret_cast<uint64_t*>(block.shared + radix_bytes);
    const float least =
        mass_threshold(block, block.shared, x, call.vocab, static_cast<uint64_t>(call.top_n),
                       [](float value) { return uint64_t(value != -INFINITY); });
    block.each([&](int t) {
      if (t == 0) *count = 0;
    });
    block.each([&](int t) {
      for (int64_t i = t; i < call.vocab; i += threads) {
        if (x[i] > least) ids[block.add(count, 1)] = static_cast<int32_t>(i);
      }
    });
    int64_t found = static_cast<int64_t>(*count);
    // Of those equal to the least the lowest ids, one after the other: hardly ever more than one.
    int64_t after = -1;
    while (found < call.top_n && least > -INFINITY) {
      typename B::template Local<int64_t> next(block);
      block.each_alone([&](int t) {
        next[t] = call.vocab;
        for (int64_t i = t; i < call.vocab; i += threads) {
          if (i > after && x[i] == least && i < next[t]) next[t] = i;
        }
      });
      after = block.reduce(next, Smaller());
      if (after == call.vocab) break;
      block.each([&](int t) {
        if (t == 0) ids[found] = static_cast<int32_t>(after);
      });
      ++found;
    }
    return found;
  }

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t n = block.x();
    const float* x = call.logits + n * call.logits_stride;
    const Finite all = extent(block, x, call.vocab);
    const bool ok = all.is_number && all.max > -INFINITY;
    typename B::template Local<double> sums(block);
    block.each_alone([&](int t) {
      if (t == 0) call.ok[n] = ok;
      sums[t] = 0;
      for (int64_t i = t; ok && i < call.vocab; i += threads) {
        sums[t] += exp(static_cast<double>(x[i]) - all.max);
      }
    });
    if (!ok) return;
    const double whole = all.max + log(block.reduce(sums, Add()));
    block.each_alone([&](int t) {
      const int32_t token = call.tokens[n];
      const bool is_inside = token >= 0 && token < call.vocab;
      if (t == 0) call.logprobs[n] = is_inside ? x[token] - whole : -INFINITY;
    });
    if (call.top_n == 0) return;
    int32_t* ids = reinterpret_cast<int32_t*>(block.shared + radix_bytes + 16);
    const int64_t found = gather_best(block, x, ids);
    block.each_alone([&](int t) {
      for (int64_t i = t; i < call.top_n; i += threads) {
        if (i >= found) {  // fewer are finite
          call.top_ids[n * call.top_n + i] = -1;
          call.top_logprobs[n * call.top_n + i] = -INFINITY;
          continue;
        }
        int64_t better = 0;
        for (int64_t j = 0; j < found; ++j) {
          const float a = x[ids[j]], b = x[ids[i]];
          better += a > b || (a == b && ids[j] < ids[i]);
        }
        call.top_ids[n * call.top_n + better] = ids[i];
        call.top_logprobs[n * call.top_n + better] = x[ids[i]] - whole;
      }
    });
  }
};

}  // namespace aserve

extern "C" {

int aserve_cuda_draw(const aserve_draw* call, void* stream) {
  using namespace aserve;
  return launch(Draw{*call}, {call->n}, radix_bytes, stream);
}

int aserve_cuda_logprobs(const aserve_logprobs* call, void* stream) {
  using namespace aserve;
  if (call->top_n > top_n_max) return 1;  // cudaErrorInvalidValue
  return launch(Logprobs{*call}, {call->n}, Logprobs::shared_bytes, stream);
}

}  // extern "C"
