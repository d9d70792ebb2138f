// float16, in which quantised blocks keep their scales, widened. Private to csrc/cpu.
#pragma once

#include <cstdint>
#include <cstring>

namespace aserve {

static inline float widen_half(uint16_t bits) {
  // Its exponent is 112 lower; the product sets that right, for denormals too, and is exact.
  const uint32_t wide = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &wide, 4);
  value *= 0x1p112f;
  uint32_t out;
  std::memcpy(&out, &value, 4);
  if ((bits & 0x7c00u) == 0x7c00u) out |= 0x7f800000u;  // infinity or NaN
  out |= static_cast<uint32_t>(bits & 0x8000u) << 16;
  std::memcpy(&value, &out, 4);
  return value;
}

}  // namespace aserve
