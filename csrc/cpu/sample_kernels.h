// The passes over a vocabulary that sampling is made of. Private to csrc/cpu.
#pragma once

#include <cmath>
#include <cstdint>

#include "aserve/noise.h"

namespace aserve {

struct Extent {
  float max;  // -inf if there is nothing else
  bool nan;
};

// A row of logits and the maximum of each block of it: passes skip blocks that cannot matter.
constexpr int64_t block_len = 64;
struct Blocks {
  const float* x;  // [n]
  int64_t n;
  const float* max;  // [ceil(n / block_len)]

  int64_t count() const { return (n + block_len - 1) / block_len; }
};

// Tokens at or above `threshold`, each scored (logit - max) * scale + gumbel.
struct Gumbel {
  float threshold, max;
  double scale;
  uint64_t key;
};

// Sums of e^((logit - max) * scale), to a part in `mass_error`.
struct Mass {
  double total;  // of logits >= `kept`
  double above;  // of those > `value`
};
constexpr double mass_error = 2e-4;

struct SampleKernels {
  Extent (*extent)(const float* x, int64_t n, float* block_max);
  void (*masked_copy)(const float* x, const uint32_t* mask, int64_t n, float* y);
  double (*sum_exp)(const float* x, int64_t n, float max, double scale);
  Mass (*mass)(const Blocks& row, const Gumbel& gumbel, float kept, float value);
  // Values >= threshold and their indices, in order; returns how many.
  int64_t (*gather)(const Blocks& row, float threshold, float* values, int32_t* ids);
  int64_t (*gumbel_argmax)(const Blocks& row, const Gumbel& gumbel);
};

extern const SampleKernels sample_generic;
extern const SampleKernels sample_avx512;

// Noise lies between these: of bits 0 and of bits 2^32 - 1.
constexpr double noise_min = -3.14, noise_max = 22.88;

}  // namespace aserve
