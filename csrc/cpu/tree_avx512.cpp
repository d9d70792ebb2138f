// Passes over candidates for AVX-512. Compiled for any x86-64: each function names its instruction set.
#include "tree_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#include "aserve/tree.h"

#define ASERVE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))

namespace aserve {
namespace {

inline __mmask16 lanes(int64_t left) {
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

// score_key of sixteen.
ASERVE_AVX512 inline __m512i keys_of(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), least = _mm512_set1_epi32(key_of_nan);
  const __m512i turned = _mm512_mask_sub_epi32(bits, _mm512_movepi32_mask(bits), least, bits);
  return _mm512_mask_mov_epi32(turned, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), least);
}

ASERVE_AVX512 bool path_keys(const float* scores, const int32_t* parents, int64_t n,
                             int32_t* keys) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __m512i own = keys_of(_mm512_maskz_loadu_ps(in, scores + i));
    const __m512i parent = _mm512_maskz_loadu_epi32(in, parents + i);
    const __mmask16 root = _mm512_cmpeq_epi32_mask(parent, _mm512_set1_epi32(-1));
    const __mmask16 below = in & ~root;
    // Unsigned, what is below -1 is not before its child either.
    const __mmask16 before =
        _mm512_cmplt_epu32_mask(parent, _mm512_set1_epi32(static_cast<int32_t>(i)));
    _mm512_mask_storeu_epi32(keys + i, in, own);
    if ((below & ~before) == 0) {
      const __m512i above = _mm512_mask_i32gather_epi32(own, below, parent, keys, 4);
      _mm512_mask_storeu_epi32(keys + i, in, _mm512_min_epi32(own, above));
      continue;
    }
    for (int64_t j = i; j < std::min(n, i + 16); ++j) {  // some parents are among the sixteen
      if (parents[j] == -1) continue;
      if (parents[j] < -1 || parents[j] >= j) return false;
      keys[j] = std::min(keys[j], keys[parents[j]]);
    }
  }
  return true;
}

ASERVE_AVX512 KeyRange range(const int32_t* keys, int64_t n) {
  __m512i low = _mm512_set1_epi32(keys[0]), high = low;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i some = _mm512_mask_loadu_epi32(low, lanes(n - i), keys + i);
    low = _mm512_min_epi32(low, some);
    high = _mm512_max_epi32(high, some);
  }
  return {_mm512_reduce_min_epi32(low), _mm512_reduce_max_epi32(high)};
}

ASERVE_AVX512 int64_t count(const int32_t* keys, int64_t n, int32_t least) {
  const __m512i edge = _mm512_set1_epi32(least), one = _mm512_set1_epi32(1);
  __m512i even = _mm512_setzero_si512(), odd = even;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i a = _mm512_loadu_si512(keys + i), b = _mm512_loadu_si512(keys + i + 16);
    even = _mm512_mask_add_epi32(even, _mm512_cmpge_epi32_mask(a, edge), even, one);
    odd = _mm512_mask_add_epi32(odd, _mm512_cmpge_epi32_mask(b, edge), odd, one);
  }
  for (; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __m512i some = _mm512_maskz_loadu_epi32(in, keys + i);
    even = _mm512_mask_add_epi32(even, _mm512_mask_cmpge_epi32_mask(in, some, edge), even, one);
  }
  return _mm512_reduce_add_epi32(_mm512_add_epi32(even, odd));
}

ASERVE_AVX512 int64_t gather(const int32_t* keys, int64_t n, int32_t least, int32_t* places) {
  const __m512i edge = _mm512_set1_epi32(least), sixteen = _mm512_set1_epi32(16);
  __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = lanes(n - i);
    const __m512i some = _mm512_maskz_loadu_epi32(in, keys + i);
    const __mmask16 reach = _mm512_mask_cmpge_epi32_mask(in, some, edge);
    _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(reach, place));
    found += __builtin_popcount(reach);
    place = _mm512_add_epi32(place, sixteen);
  }
  return found;
}

}  // namespace

const TreeKernels tree_avx512 = {path_keys, range, count, gather};

}  // namespace aserve

#endif
