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

// Tokens at or above `threshold`, each scored (logit - max) * scale + gumbel.
struct Gumbel {
  float threshold, max;
  double scale;
  uint64_t key;
};

struct SampleKernels {
  Extent (*extent)(const float* x, int64_t n);
  int64_t (*first_equal)(const float* x, int64_t n, float value);  // n if none
  void (*masked_copy)(const float* x, const uint32_t* mask, int64_t n, float* y);
  double (*sum_exp)(const float* x, int64_t n, float max, double scale);
  // Values >= threshold and their indices, in order; returns how many.
  int64_t (*gather)(const float* x, int64_t n, float threshold, float* values, int32_t* ids);
  int64_t (*gumbel_argmax)(const float* x, int64_t n, const Gumbel& gumbel);
};

extern const SampleKernels sample_generic;
extern const SampleKernels sample_avx512;

}  // namespace aserve
