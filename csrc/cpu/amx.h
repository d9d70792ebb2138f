// Tiles of AMX in inline assembly, and the transposition they call for. The intrinsics of GCC 12
// tell the compiler neither that loads read memory nor how long a configuration is, so stores
// before them may be lost. Needs the AMX target; private to csrc/cpu.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace aserve {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t n, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(n);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

inline void tile_configure(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int T>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// C += A B over 32 k: A rows of 32 bfloat16, B sixteen rows of pairs.
template <int C, int A, int B>
inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The first n of sixteen lanes.
inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

// Sixteen rows of sixteen 32-bit words.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = 0; i < 4; ++i) {
      t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + 4 + i], 0x88);
      t[half + 4 + i] = _mm512_shuffle_i32x4(r[half + i], r[half + 4 + i], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

}  // namespace
}  // namespace aserve
