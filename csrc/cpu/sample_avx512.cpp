// Sampling passes for AVX-512. Compiled for any x86-64: each function names its instruction set.
#include "sample_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <limits>

#define ASERVE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))

namespace aserve {
namespace {

// Floats err by less than this wherever a token can still win.
constexpr double slack = 1e-3;
constexpr float lowest = -std::numeric_limits<float>::infinity();

inline __mmask16 lanes(int64_t left) {
  if (left <= 0) return 0;
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

constexpr int64_t ahead = 1024;  // floats that are fetched before they are looked at

ASERVE_AVX512 Extent extent(const float* x, int64_t n, float* block_max) {
  const __m512 low = _mm512_set1_ps(lowest);
  __m512 all = low;
  __mmask16 nan = 0;
  for (int64_t i = 0; i < n; i += block_len) {
    __m512 v[4];
    for (int j = 0; j < 4; ++j) {
      const __mmask16 in = i + block_len <= n ? 0xffff : lanes(n - i - 16 * j);
      v[j] = _mm512_mask_loadu_ps(low, in, x + i + 16 * j);
      _mm_prefetch(reinterpret_cast<const char*>(x + i + 16 * j + ahead), _MM_HINT_T0);
    }
    nan |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q);
    nan |= _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
    const __m512 most = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
    block_max[i / block_len] = _mm512_reduce_max_ps(most);
    all = _mm512_max_ps(all, most);
  }
  return {_mm512_reduce_max_ps(all), nan != 0};
}

ASERVE_AVX512 void masked_copy(const float* x, const uint32_t* mask, int64_t n, float* y) {
  const __m512 low = _mm512_set1_ps(lowest);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __mmask16 keep = in & static_cast<__mmask16>(mask[i / 32] >> (i % 32));
    _mm512_mask_storeu_ps(y + i, in, _mm512_mask_loadu_ps(low, keep, x + i));
  }
}

// e^x for x <= 0, relative error about 2e-16: Cody and Waite reduction, Taylor to degree 12.
ASERVE_AVX512 inline __m512d exp8(__m512d x) {
  x = _mm512_max_pd(x, _mm512_set1_pd(-745.5));
  const __m512d whole = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(0x1.71547652b82fep0)), 8);
  __m512d f = _mm512_fnmadd_pd(whole, _mm512_set1_pd(0x1.62e42fee00000p-1), x);
  f = _mm512_fnmadd_pd(whole, _mm512_set1_pd(0x1.a39ef35793c76p-33), f);
  const double inverse_factorials[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,
      1.0};
  __m512d p = _mm512_set1_pd(inverse_factorials[0]);
  for (int i = 1; i < 13; ++i) p = _mm512_fmadd_pd(p, f, _mm512_set1_pd(inverse_factorials[i]));
  return _mm512_scalef_pd(p, whole);
}

ASERVE_AVX512 double sum_exp(const float* x, int64_t n, float max, double scale) {
  const __m512d shift = _mm512_set1_pd(max), by = _mm512_set1_pd(scale);
  __m512d total[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(lowest), lanes(n - i), x + i);
    const __m256 half[2] = {_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)};
    for (int j = 0; j < 2; ++j) {
      const __m512d d = _mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(half[j]), shift), by);
      const __mmask8 some = _mm512_cmp_pd_mask(d, _mm512_set1_pd(-745.0), _CMP_GE_OQ);
      total[j] = _mm512_mask_add_pd(total[j], some, total[j], exp8(d));
    }
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(total[0], total[1]));
}

// Which of the blocks [first, first + 16) reach `threshold`.
ASERVE_AVX512 inline unsigned reaching(const Blocks& row, int64_t first, float threshold) {
  const __mmask16 in = lanes(row.count() - first);
  const __m512 most = _mm512_maskz_loadu_ps(in, row.max + first);
  return _mm512_mask_cmp_ps_mask(in, most, _mm512_set1_ps(threshold), _CMP_GE_OQ);
}

// e^x for x <= 0 to a few parts in 10^7; below -87 as there.
ASERVE_AVX512 inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p0f)), 8);
  __m512 f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0x1.62e400p-1f), x);
  f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0x1.7f7d1cp-20f), f);
  const float inverse_factorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
  __m512 p = _mm512_set1_ps(inverse_factorials[0]);
  for (int i = 1; i < 7; ++i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(inverse_factorials[i]));
  return _mm512_scalef_ps(p, whole);
}

ASERVE_AVX512 Mass mass(const Blocks& row, const Gumbel& gumbel, float kept, float value) {
  const __m512 least = _mm512_set1_ps(kept), edge = _mm512_set1_ps(value);
  const __m512 shift = _mm512_set1_ps(gumbel.max);
  const __m512 scale = _mm512_set1_ps(static_cast<float>(gumbel.scale));
  __m512 total[4] = {}, above[4] = {};
  for (int64_t first = 0; first < row.count(); first += 16) {
    for (unsigned left = reaching(row, first, kept); left; left &= left - 1) {
      const int64_t i = (first + __builtin_ctz(left)) * block_len;
      for (int j = 0; j < 4; ++j) {
        const __mmask16 in = lanes(row.n - i - 16 * j);
        const __m512 v = _mm512_maskz_loadu_ps(in, row.x + i + 16 * j);
        const __m512 weight = exp16(_mm512_mul_ps(_mm512_sub_ps(v, shift), scale));
        const __mmask16 counts = _mm512_mask_cmp_ps_mask(in, v, least, _CMP_GE_OQ);
        total[j] = _mm512_mask_add_ps(total[j], counts, total[j], weight);
        const __mmask16 higher = _mm512_mask_cmp_ps_mask(in, v, edge, _CMP_GT_OQ);
        above[j] = _mm512_mask_add_ps(above[j], higher, above[j], weight);
      }
    }
  }
  Mass out = {0, 0};
  for (int j = 0; j < 4; ++j) {
    out.total += _mm512_reduce_add_ps(total[j]);
    out.above += _mm512_reduce_add_ps(above[j]);
  }
  return out;
}

ASERVE_AVX512 int64_t gather(const Blocks& row, float threshold, float* values, int32_t* ids) {
  const __m512 least = _mm512_set1_ps(threshold);
  const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int64_t first = 0; first < row.count(); first += 16) {
    for (unsigned left = reaching(row, first, threshold); left; left &= left - 1) {
      const int64_t start = (first + __builtin_ctz(left)) * block_len;
      for (int64_t i = start; i < start + block_len && i < row.n; i += 16) {
        const __mmask16 in = lanes(row.n - i);
        const __m512 v = _mm512_maskz_loadu_ps(in, row.x + i);
        const __mmask16 keep = _mm512_mask_cmp_ps_mask(in, v, least, _CMP_GE_OQ);
        const __m512i id = _mm512_add_epi32(ramp, _mm512_set1_epi32(static_cast<int32_t>(i)));
        _mm512_mask_compressstoreu_ps(values + count, keep, v);
        _mm512_mask_compressstoreu_epi32(ids + count, keep, id);
        count += __builtin_popcount(keep);
      }
    }
  }
  return count;
}

ASERVE_AVX512 inline __m512i mix32x16(__m512i x) {
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x21F0AAAD));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x735A2D97));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

// As in sample_generic.cpp, but for rounding.
ASERVE_AVX512 inline __m512 gumbel_bound(__m512i bits) {
  const __m512i rest = _mm512_xor_si512(bits, _mm512_set1_epi32(-1));
  const __m512 v = _mm512_add_ps(_mm512_cvtepu32_ps(rest), _mm512_set1_ps(0.5f));
  const __m512 log2_v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(v)),
                                        _mm512_set1_ps(0x1p-23f), _mm512_set1_ps(-159.0f));
  return _mm512_mul_ps(log2_v, _mm512_set1_ps(-0.69314718f));
}

// No bits below this have noise of `wanted`: 1 - uniform <= e^-wanted, and 2^t is at most its chord
// between whole t.
inline uint32_t bits_least(double wanted) {
  const double t = 32.0 - wanted * 1.4426950408889634;
  if (!(t < 32.0)) return 0;
  const double part = t < 0 ? 1.0 : t;
  const int32_t whole = static_cast<int32_t>(part);
  const double most = static_cast<double>(uint64_t{1} << whole) * (1 + (part - whole)) + 2;
  return most < 0x1p32 ? static_cast<uint32_t>(0x1p32 - most) : 0;
}

// The best score so far and where it was found.
struct Race {
  double best = -std::numeric_limits<double>::infinity();
  int64_t winner;
};

// Scores those of 16 tokens from `i` on that may win.
ASERVE_AVX512 void score(const Blocks& row, const Gumbel& gumbel, int64_t i, __m512i bits,
                         Race& race) {
  const __mmask16 in = lanes(row.n - i);
  const __m512 v = _mm512_maskz_loadu_ps(in, row.x + i);
  const __mmask16 keep =
      _mm512_mask_cmp_ps_mask(in, v, _mm512_set1_ps(gumbel.threshold), _CMP_GE_OQ);
  const __m512 logits = _mm512_mul_ps(_mm512_sub_ps(v, _mm512_set1_ps(gumbel.max)),
                                      _mm512_set1_ps(static_cast<float>(gumbel.scale)));
  const __m512 bound = _mm512_add_ps(logits, gumbel_bound(bits));
  const __m512 to_beat = _mm512_set1_ps(static_cast<float>(race.best - slack));
  unsigned may = _mm512_mask_cmp_ps_mask(keep, bound, to_beat, _CMP_GE_OQ);
  if (!may) return;
  alignas(64) uint32_t noise[16];
  _mm512_store_si512(noise, bits);
  for (; may; may &= may - 1) {
    const int j = __builtin_ctz(may);
    const double logit = (static_cast<double>(row.x[i + j]) - gumbel.max) * gumbel.scale;
    const double found = logit + gumbel_noise(noise[j]);
    if (found > race.best) race = {found, i + j};
  }
}

ASERVE_AVX512 int64_t gumbel_argmax(const Blocks& row, const Gumbel& gumbel) {
  const __m512i golden = _mm512_set1_epi32(static_cast<int32_t>(0x9E3779B9u));
  const __m512i low = _mm512_set1_epi32(static_cast<int32_t>(gumbel.key));
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(gumbel.key >> 32));
  const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i from = _mm512_add_epi32(_mm512_mullo_epi32(ramp, golden), low);
  Race race;
  race.winner = row.n;
  // What a block's best needs to win is at least what the whole row's best has at worst.
  double to_beat = noise_min;
  for (int64_t first = 0; first < row.count(); first += 16) {
    for (unsigned left = reaching(row, first, gumbel.threshold); left; left &= left - 1) {
      const int64_t block = first + __builtin_ctz(left), start = block * block_len;
      const double logit = (static_cast<double>(row.max[block]) - gumbel.max) * gumbel.scale;
      if (logit + noise_max + slack < to_beat) continue;
      const uint32_t least = bits_least(to_beat - slack - logit);
      const __m512i enough = _mm512_set1_epi32(static_cast<int32_t>(least));
      __m512i bits[4];
      __mmask16 may[4];
      for (int j = 0; j < 4; ++j) {
        const uint32_t i = static_cast<uint32_t>(start) + 16 * j;
        const __m512i inner =
            _mm512_add_epi32(from, _mm512_set1_epi32(static_cast<int32_t>(i * 0x9E3779B9u)));
        bits[j] = mix32x16(_mm512_add_epi32(mix32x16(inner), high));
        may[j] = _mm512_cmpge_epu32_mask(bits[j], enough);
      }
      if (!(may[0] | may[1] | may[2] | may[3])) continue;
      for (int j = 0; j < 4; ++j) {
        if (may[j]) score(row, gumbel, start + 16 * j, bits[j], race);
      }
      to_beat = std::max(to_beat, race.best);
    }
  }
  return race.winner;
}

}  // namespace

const SampleKernels sample_avx512 = {extent, masked_copy, sum_exp, mass, gather, gumbel_argmax};

}  // namespace aserve

#endif
