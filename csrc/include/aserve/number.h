// Element types of weights and KV, and the rounding between them; any processor.
#pragma once

#include <cstdint>
#include <cstring>

#include "aserve/index.h"

namespace aserve {

// i8 is for KV only: a head is its values and then their scale, a float32.
enum class Type { f32 = 0, bf16 = 1, i8 = 2 };

ASERVE_HD int64_t type_bytes(Type type) { return type == Type::i8 ? 1 : type == Type::bf16 ? 2 : 4; }

// Values in a head that takes so many elements of the type.
ASERVE_HD int64_t values_of(Type type, int64_t elements) {
  return type == Type::i8 ? elements - 4 : elements;
}

ASERVE_HD float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
ASERVE_HD float widen(float value) { return value; }

// To nearest, ties to even; NaN stays NaN.
ASERVE_HD uint16_t narrow(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((wide >> 16) | 0x40u);
  return static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

}  // namespace aserve
