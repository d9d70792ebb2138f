// Floats as integers in the same order, and the filter that is a search over them; any processor.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "aserve/index.h"

namespace aserve {

// Integers in the order of the floats they stand for, and back. Both zeros are 0.
ASERVE_HD int64_t ordered(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits >= 0 ? bits : INT_MIN - static_cast<int64_t>(bits);
}

ASERVE_HD float from_ordered(int64_t place) {
  const int32_t bits = static_cast<int32_t>(place >= 0 ? place : INT_MIN - place);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The least float whose probability is at least min_p of the best one's: (x - max) * scale is not
// below log(min_p).
ASERVE_HD float min_p_threshold(float max, double scale, double min_p) {
  const double least = log(min_p);
  // Halving over all floats: a formula would be off by many of them where it cancels to near 0.
  int64_t low = ordered(-FLT_MAX), high = ordered(max);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if ((static_cast<double>(from_ordered(middle)) - max) * scale >= least) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return from_ordered(high);
}

}  // namespace aserve
