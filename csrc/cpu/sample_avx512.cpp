// Sampling passes for AVX-512. Compiled for any x86-64: each function names its instruction set.
#include "sample_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <limits>

#define ASERVE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))

namespace aserve {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

inline __mmask16 lanes(int64_t left) {
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

ASERVE_AVX512 Extent extent(const float* x, int64_t n) {
  const __m512 low = _mm512_set1_ps(lowest);
  __m512 most[4] = {low, low, low, low};
  __mmask16 nan = 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const __m512 v = _mm512_loadu_ps(x + i + 16 * j);
      nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      most[j] = _mm512_max_ps(most[j], v);
    }
  }
  for (; i < n; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(low, lanes(n - i), x + i);
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    most[0] = _mm512_max_ps(most[0], v);
  }
  const __m512 all = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  return {_mm512_reduce_max_ps(all), nan != 0};
}

ASERVE_AVX512 int64_t first_equal(const float* x, int64_t n, float value) {
  const __m512 wanted = _mm512_set1_ps(value);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __m512 v = _mm512_maskz_loadu_ps(in, x + i);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(in, v, wanted, _CMP_EQ_OQ);
    if (hit) return i + __builtin_ctz(hit);
  }
  return n;
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

ASERVE_AVX512 int64_t gather(const float* x, int64_t n, float threshold, float* values,
                             int32_t* ids) {
  const __m512 least = _mm512_set1_ps(threshold);
  __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __m512 v = _mm512_maskz_loadu_ps(in, x + i);
    const __mmask16 keep = _mm512_mask_cmp_ps_mask(in, v, least, _CMP_GE_OQ);
    if (keep) {
      _mm512_mask_compressstoreu_ps(values + count, keep, v);
      _mm512_mask_compressstoreu_epi32(ids + count, keep, id);
      count += __builtin_popcount(keep);
    }
    id = _mm512_add_epi32(id, _mm512_set1_epi32(16));
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

// As in sample.cpp, but for rounding.
ASERVE_AVX512 inline __m512 gumbel_bound(__m512i bits) {
  const __m512i rest = _mm512_xor_si512(bits, _mm512_set1_epi32(-1));
  const __m512 v = _mm512_add_ps(_mm512_cvtepu32_ps(rest), _mm512_set1_ps(0.5f));
  const __m512 log2_v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(v)),
                                        _mm512_set1_ps(0x1p-23f), _mm512_set1_ps(-159.0f));
  return _mm512_mul_ps(log2_v, _mm512_set1_ps(-0.69314718f));
}

ASERVE_AVX512 int64_t gumbel_argmax(const float* x, int64_t n, const Gumbel& gumbel) {
  // Floats err by less than this wherever a token can still win.
  constexpr double slack = 1e-3;
  const __m512 least = _mm512_set1_ps(gumbel.threshold), shift = _mm512_set1_ps(gumbel.max);
  const __m512 scale = _mm512_set1_ps(static_cast<float>(gumbel.scale));
  const __m512i low = _mm512_set1_epi32(static_cast<int32_t>(gumbel.key));
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(gumbel.key >> 32));
  const __m512i golden = _mm512_set1_epi32(static_cast<int32_t>(0x9E3779B9u));
  __m512i id = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  double best = -std::numeric_limits<double>::infinity();
  __m512 to_beat = _mm512_set1_ps(lowest);
  int64_t winner = n;
  for (int64_t i = 0; i < n; i += 16, id = _mm512_add_epi32(id, _mm512_set1_epi32(16))) {
    const __mmask16 in = lanes(n - i);
    const __m512 v = _mm512_maskz_loadu_ps(in, x + i);
    const __mmask16 keep = _mm512_mask_cmp_ps_mask(in, v, least, _CMP_GE_OQ);
    if (!keep) continue;
    const __m512i inner = _mm512_add_epi32(_mm512_mullo_epi32(id, golden), low);
    const __m512i bits = mix32x16(_mm512_add_epi32(mix32x16(inner), high));
    const __m512 bound = _mm512_fmadd_ps(_mm512_sub_ps(v, shift), scale, gumbel_bound(bits));
    unsigned may = _mm512_mask_cmp_ps_mask(keep, bound, to_beat, _CMP_GE_OQ);
    if (!may) continue;
    alignas(64) uint32_t noise[16];
    _mm512_store_si512(noise, bits);
    for (; may; may &= may - 1) {
      const int j = __builtin_ctz(may);
      const double logit = (static_cast<double>(x[i + j]) - gumbel.max) * gumbel.scale;
      const double score = logit + gumbel_noise(noise[j]);
      if (score > best) best = score, winner = i + j;
    }
    to_beat = _mm512_set1_ps(static_cast<float>(best - slack));
  }
  return winner;
}

}  // namespace

const SampleKernels sample_avx512 = {extent,  first_equal, masked_copy,
                                     sum_exp, gather,      gumbel_argmax};

}  // namespace aserve

#endif
