// The sampling noise, for every processor. aserve/core/noise.py has the specification.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "aserve/index.h"

namespace aserve {

ASERVE_HD uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Of the draw of the token that will stand at `position`.
ASERVE_HD uint64_t draw_key(uint64_t seed, uint64_t position) {
  return mix64(mix64(seed) + 0x9E3779B97F4A7C15u * (position + 1));
}

ASERVE_HD uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

ASERVE_HD uint32_t noise_bits(uint64_t key, uint32_t token) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  return mix32(mix32(token * 0x9E3779B9u + low) + high);
}

ASERVE_HD double gumbel_noise(uint32_t bits) {
  return -log(-log((bits + 0.5) * 0x1p-32));
}

// Not below the noise, and close to it where it is large. With v = 1 - uniform: -log(uniform) >= v,
// and log2(v) is at least its line between powers of two.
ASERVE_HD double gumbel_bound(uint32_t bits) {
  const float v = static_cast<float>(~bits) + 0.5f;
  int32_t as_integer;
  memcpy(&as_integer, &v, 4);
  return (159.0f - static_cast<float>(as_integer) * 0x1p-23f) * 0.69314718f + 1e-3f;
}

}  // namespace aserve
