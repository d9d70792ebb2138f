// The passes over a vocabulary that sampling is made of. Private to csrc/cpu.
#pragma once

#include <cmath>
#include <cstdint>

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

// core/noise.py has the specification.
inline uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}
inline uint32_t noise_bits(uint64_t key, uint32_t token) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  return mix32(mix32(token * 0x9E3779B9u + low) + high);
}
inline double gumbel_noise(uint32_t bits) {
  return -std::log(-std::log((bits + 0.5) * 0x1p-32));
}

}  // namespace aserve
