// Attention on AMX tiles, for bfloat16 pages. Scores are taken as K Q^T: K rows lie in the pages as
// the unit wants its left operand, and a softmax over keys then runs down lanes, without a shuffle.
// A lane is a (query row, head of the group) pair, sixteen to a tile, or four when there are no more.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#endif
#include "amx.h"
#define ASERVE_LEVEL 2

namespace aserve {
namespace {
#include "vec.inc"

// The task in the units of the loops. dim_pad: dim rounded up to 32, zeros after dim.
struct Work {
  const AttentionTask* task;
  const Attention* call;
  int64_t dim, dim_pad, group, lanes, limit;
  const int32_t* pages;
  bool in_place;  // sixteen keys of a block always lie in one page, unpadded
  char* q;        // [tile][dim_pad / 32][16 pairs][16 lanes][2]
  float* o;       // [tile][16 lanes][dim_pad], dims in the order of `weave`
  uint16_t* k;    // [64][dim_pad], where not in place
  uint16_t* v;    // [32 pairs][dim_pad][2]
  float* scores;  // [64][lanes of a tile]
  uint16_t* p;    // [16 lanes][64]
};

struct alignas(64) Lanes {
  float max[16], sum[16], position[16];
  int64_t position_min, position_max;
};

static inline void transpose(__m512i (&r)[16]) {
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

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

// The queries of a tile as pairs of dims by lanes; lanes that do not exist are zero.
static void load_queries(const Work& w, int64_t tile) {
  const AttentionTask& task = *w.task;
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t lane = tile * 16 + i;
      r[i] = _mm512_setzero_si512();
      if (lane >= w.lanes) continue;
      const float* q = w.call->q + (task.row_begin + lane / w.group) * w.call->q_stride +
                       (task.kv_head * w.group + lane % w.group) * w.dim + d;
      const __m512 low = _mm512_maskz_loadu_ps(first(w.dim - d), q);
      const __m512 high = _mm512_maskz_loadu_ps(first(w.dim - d - 16), q + 16);
      r[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    transpose(r);
    char* to = w.q + tile * w.dim_pad * 32 + d * 32;
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, r[i]);
  }
}

static void open_tile(const Work& w, int64_t tile, Lanes& lanes) {
  load_queries(w, tile);
  std::memset(w.o + tile * 16 * w.dim_pad, 0, static_cast<size_t>(w.dim_pad) * 64);
  const int64_t n = std::min<int64_t>(16, w.lanes - tile * 16);
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t lane = tile * 16 + std::min(i, n - 1);
    lanes.max[i] = -INFINITY;
    lanes.sum[i] = 0.0f;
    lanes.position[i] = static_cast<float>(w.task->position_begin + lane / w.group);
  }
  lanes.position_min = w.task->position_begin + tile * 16 / w.group;
  lanes.position_max = w.task->position_begin + (tile * 16 + n - 1) / w.group;
}

static const uint16_t* row_of(const Work& w, const void* pool, const PageShape& shape,
                              int64_t position) {
  const int64_t page = position / shape.page_size;
  const int64_t slot = w.pages[page] * shape.page_size + (position - page * shape.page_size);
  return static_cast<const uint16_t*>(pool) + slot_offset(shape, slot) + w.task->kv_head * w.dim;
}

static void gather_keys(const Work& w, int64_t begin, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t* from = row_of(w, w.call->k, w.call->k_shape, begin + i);
    for (int64_t d = 0; d < w.dim_pad; d += 16) {
      const __m256i x = d < w.dim ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d))
                                  : _mm256_setzero_si256();
      _mm256_store_si256(reinterpret_cast<__m256i*>(w.k + i * w.dim_pad + d), x);
    }
  }
}

// Values as pairs of keys, two rows woven into one. Within 32 dims the order becomes 0-3, 8-11,
// 16-19, 24-27, 4-7, ...: cheaper here, once a block, than it is to undo once a tile. Keys from n
// on are zero: their weights are too, but what lies in the page may be a NaN.
static void weave_values(const Work& w, int64_t begin, int64_t n) {
  for (int64_t i = 0; i < key_block; i += 2) {
    uint16_t* to = w.v + i * w.dim_pad;
    if (i >= n) {
      std::memset(to, 0, static_cast<size_t>(w.dim_pad) * 4);
      continue;
    }
    const uint16_t* even = row_of(w, w.call->v, w.call->v_shape, begin + i);
    const uint16_t* odd = i + 1 < n ? row_of(w, w.call->v, w.call->v_shape, begin + i + 1) : even;
    const __mmask32 with_odd = i + 1 < n ? 0xffffffffu : 0u;
    for (int64_t d = 0; d < w.dim_pad; d += 32) {
      const __mmask32 mask = w.dim - d >= 32 ? 0xffffffffu : 0xffffu;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + d);
      const __m512i b = _mm512_maskz_loadu_epi16(mask & with_odd, odd + d);
      _mm512_store_si512(to + d * 2, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + d * 2 + 32, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// scores[key][lane] for sixteen keys at a time. Tiles: 0 and 1 scores, 4 and 5 keys, 6 queries.
static void score_block(const Work& w, int64_t tile, int64_t begin, int64_t n, int64_t row_bytes) {
  const int64_t stride =
      w.in_place ? w.call->k_shape.heads * w.dim * 2 : w.dim_pad * 2;
  const char* q = w.q + tile * w.dim_pad * 32;
  for (int64_t i = 0; i < n; i += 16) {
    const uint16_t* k = w.in_place ? row_of(w, w.call->k, w.call->k_shape, begin + i)
                                   : w.k + i * w.dim_pad;
    tile_zero<0>();
    for (int64_t d = 0; d < w.dim_pad; d += 32) {
      tile_load<4>(k + d, stride);
      tile_load<6>(q + d * 32, 64);
      tile_multiply<0, 4, 6>();
    }
    tile_store<0>(reinterpret_cast<char*>(w.scores) + i * row_bytes, row_bytes);
  }
}

// The running maximum and sum of a tile and the weights of a block, four keys in step: sums go by
// key modulo 4, so that both forms below add in the same order.
static V soften_wide(const Work& w, Lanes& lanes, int64_t begin, int64_t n) {
  const V factor = all(w.call->scale * 1.44269504f), old = load(lanes.max);
  const V position = load(lanes.position);
  const bool masks = begin + n - 1 > lanes.position_min;
  V top[2] = {old, old};
  for (int64_t i = 0; i < n; ++i) {
    V s = load(w.scores + i * 16) * factor;
    if (masks) s = where_ge(position, all(static_cast<float>(begin + i)), s, all(-INFINITY));
    store(w.scores + i * 16, s);
    top[i & 1] = max(top[i & 1], s);
  }
  const V peak = max(top[0], top[1]);
  V sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t half = 0; half < key_block; half += 32) {
    __m512i r[16];
    for (int64_t i = 0; i < 32; i += 2) {
      const int64_t key = half + i;
      const V a = key < n ? exp2(load(w.scores + key * 16) - peak) : all(0.0f);
      const V b = key + 1 < n ? exp2(load(w.scores + key * 16 + 16) - peak) : all(0.0f);
      sums[key & 3] = sums[key & 3] + a;
      sums[(key + 1) & 3] = sums[(key + 1) & 3] + b;
      r[i / 2] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
    }
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(w.p + i * key_block + half, r[i]);
  }
  const V scale = exp2(old - peak);
  store(lanes.max, peak);
  store(lanes.sum, fma(load(lanes.sum), scale, (sums[0] + sums[1]) + (sums[2] + sums[3])));
  return scale;
}

// o = o * scale + P V. Tiles: 0..3 outputs, 4 weights, 6 values.
static void weigh_block(const Work& w, int64_t tile, V scale, int64_t lanes) {
  float* o = w.o + tile * 16 * w.dim_pad;
  alignas(64) float scales[16];
  store(scales, scale);
  if (_mm512_cmp_ps_mask(scale.v, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) & first(lanes)) {
    for (int64_t i = 0; i < lanes; ++i) {
      const V by = all(scales[i]);
      for (int64_t d = 0; d < w.dim_pad; d += 16) {
        store(o + i * w.dim_pad + d, load(o + i * w.dim_pad + d) * by);
      }
    }
  }
  const int64_t o_stride = w.dim_pad * 4;
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    tile_load<0>(o + d, o_stride);
    tile_load<1>(o + d + 16, o_stride);
    for (int64_t key = 0; key < key_block; key += 32) {
      const uint16_t* v = w.v + key * w.dim_pad + d * 2;
      tile_load<4>(w.p + key, key_block * 2);
      tile_load<6>(v, w.dim_pad * 4);
      tile_multiply<0, 4, 6>();
      tile_load<7>(v + 32, w.dim_pad * 4);
      tile_multiply<1, 4, 7>();
    }
    tile_store<0>(o + d, o_stride);
    tile_store<1>(o + d + 16, o_stride);
  }
}

static void close_tile(const Work& w, int64_t tile, const Lanes& lanes) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const int64_t n = std::min<int64_t>(16, w.lanes - tile * 16);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t lane = tile * 16 + i;
    const float* o = w.o + lane * w.dim_pad;
    float* out = w.call->out +
                 ((w.task->row_begin + lane / w.group) * w.call->heads +
                  w.task->kv_head * w.group + lane % w.group) * w.dim;
    const V sum = all(lanes.sum[i]);
    for (int64_t d = 0; d < w.dim_pad; d += 32) {
      const V a = load(o + d) / sum, b = load(o + d + 16) / sum;
      _mm512_mask_storeu_ps(out + d, first(w.dim - d), _mm512_permutex2var_ps(a.v, low, b.v));
      _mm512_mask_storeu_ps(out + d + 16, first(w.dim - d - 16),
                            _mm512_permutex2var_ps(a.v, high, b.v));
    }
  }
}

static void run(const Work& w, Lanes* lanes) {
  const int64_t tiles = (w.lanes + 15) / 16;
  for (int64_t t = 0; t < tiles; ++t) open_tile(w, t, lanes[t]);
  for (int64_t begin = 0; begin < w.limit; begin += key_block) {
    const int64_t n = std::min(key_block, w.limit - begin);
    if (!w.in_place) gather_keys(w, begin, n);
    weave_values(w, begin, n);
    for (int64_t t = 0; t < tiles; ++t) {
      if (begin > lanes[t].position_max) continue;
      const int64_t keys = std::min(n, lanes[t].position_max + 1 - begin);
      score_block(w, t, begin, keys, 64);
      const V scale = soften_wide(w, lanes[t], begin, keys);
      weigh_block(w, t, scale, 16);
    }
  }
  for (int64_t t = 0; t < tiles; ++t) close_tile(w, t, lanes[t]);
}

static void configure() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  tile_configure(config);
}

}  // namespace

bool amx_attention_fits(const Attention& call) {
  return call.type == Type::bf16 && call.k_shape.dim % 16 == 0;
}

void amx_attention(const AttentionTask& task) {
  const Attention& call = *task.call;
  Work w{};
  w.task = &task;
  w.call = &call;
  w.dim = call.k_shape.dim;
  w.dim_pad = (w.dim + 31) / 32 * 32;
  w.group = call.heads / call.k_shape.heads;
  w.lanes = (task.row_end - task.row_begin) * w.group;
  w.limit = task.position_begin + task.row_end - task.row_begin;
  w.pages = call.page_table + task.sequence * call.pages_max;
  w.in_place = call.k_shape.page_size % 16 == 0 && w.dim == w.dim_pad;
  const int64_t tiles = (w.lanes + 15) / 16;
  const int64_t q_bytes = tiles * w.dim_pad * 32, o_bytes = tiles * w.dim_pad * 64;
  w.q = static_cast<char*>(thread_scratch(scratch_rows, q_bytes + o_bytes));
  w.o = reinterpret_cast<float*>(w.q + q_bytes);
  w.k = static_cast<uint16_t*>(thread_scratch(scratch_keys, key_block * w.dim_pad * 2));
  w.v = static_cast<uint16_t*>(thread_scratch(scratch_values, key_block * w.dim_pad * 2));
  char* scores = static_cast<char*>(thread_scratch(scratch_scores, key_block * 96));
  w.scores = reinterpret_cast<float*>(scores);
  w.p = reinterpret_cast<uint16_t*>(scores + key_block * 64);
  configure();
  run(w, static_cast<Lanes*>(
             thread_scratch(scratch_out, tiles * static_cast<int64_t>(sizeof(Lanes)))));
  tile_release();
}

}  // namespace aserve

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
