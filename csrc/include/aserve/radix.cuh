// Finding the float at which a mass counted from the top is reached: digits of ordered floats from the
// highest down, each by a histogram of 2048 bins in shared memory. Masses are integers, so that their
// sums have one value in whatever order threads add them.
#pragma once

#include <cstdint>

#include "aserve/threshold.h"
#include "aserve/thread_block.cuh"

namespace aserve {

constexpr int radix_bins = 2048;
constexpr int64_t radix_bytes = radix_bins * 8 + 64 * 8 + 4 * 8;

// A float's place among all, from 0 up, in 32 bits: digits of 11, 11 and 10 bits. Of NaN nothing.
ASERVE_HD uint32_t radix_key(float x) {
  return static_cast<uint32_t>(ordered(x) - static_cast<int64_t>(INT_MIN));
}
ASERVE_HD float radix_float(uint32_t key) {
  return from_ordered(static_cast<int64_t>(key) + INT_MIN);
}
ASERVE_HD int radix_shift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
ASERVE_HD uint32_t radix_digit(uint32_t key, int digit) {
  return digit < 2 ? key >> radix_shift(digit) & 2047u : key & 1023u;
}
// The digits before `digit`.
ASERVE_HD uint32_t radix_before(uint32_t key, int digit) {
  return digit == 0 ? 0 : key >> radix_shift(digit - 1);
}

// The highest threshold such that the mass of all x at or above it reaches `wanted` > 0; -inf if all
// of it does not. mass(x) is a uint64_t; those with mass 0 take no part. Uses radix_bytes of shared
// memory from `room` on.
template <class B, class Mass>
ASERVE_DEVICE float mass_threshold(B& block, char* room, const float* x, int64_t n,
                                   uint64_t wanted, const Mass& mass) {
  uint64_t* bins = reinterpret_cast<uint64_t*>(room);
  uint64_t* sums = bins + radix_bins;    // of 32 bins each
  uint64_t* found = sums + 64;           // the digit, and what is left to reach in it
  uint32_t prefix = 0;
  for (int digit = 0; digit < 3; ++digit) {
    block.each([&](int t) {
      for (int i = t; i < radix_bins; i += B::threads) bins[i] = 0;
    });
    block.each([&](int t) {
      for (int64_t i = t; i < n; i += B::threads) {
        const uint32_t key = radix_key(x[i]);
        if (radix_before(key, digit) != prefix) continue;
        const uint64_t m = mass(x[i]);
        if (m > 0) block.add(bins + radix_digit(key, digit), m);
      }
    });
    block.each([&](int t) {
      if (t >= 64) return;
      uint64_t sum = 0;
      for (int i = 0; i < 32; ++i) sum += bins[t * 32 + (i + t) % 32];
      sums[t] = sum;
    });
    block.each([&](int t) {
      if (t != 0) return;
      uint64_t left = wanted;
      int group = 63;
      while (group >= 0 && sums[group] < left) left -= sums[group--];
      int bin = group * 32 + 31;
      while (group >= 0 && bins[bin] < left) left -= bins[bin--];
      found[0] = group < 0 ? radix_bins : static_cast<uint64_t>(bin);
      found[1] = left;
    });
    if (found[0] == radix_bins) return -INFINITY;
    prefix = prefix << (digit < 2 ? 11 : 10) | static_cast<uint32_t>(found[0]);
    wanted = found[1];
    block.sync();
  }
  return radix_float(prefix);
}

}  // namespace aserve
