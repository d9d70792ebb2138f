// Attention on AMX tiles, for bfloat16 pages. Scores are taken as K Q^T: K rows lie in the pages as
// the unit wants its left operand, and a softmax over keys then runs down lanes, without a shuffle.
// A lane is a (query row, head of the group) pair, sixteen to a tile, or four when there are no more.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "target.h"

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"
#define ASERVE_LEVEL 2

namespace aserve {
namespace {
#include "vec.inc"

// The task in the units of the loops. A unit is one tile of lanes of one KV head; dim_pad is dim
// rounded up to 32, with zeros after dim.
struct Work {
  const AttentionTask* task;
  const Attention* call;
  int64_t dim, dim_pad, group;
  int64_t lanes, tiles;  // of one KV head
  int64_t limit;         // keys that some row sees
  float factor;          // scale * log2(e)
  const int32_t* pages;
  bool in_place;         // sixteen keys of a block always lie in one page, unpadded
  char* q;               // [unit][dim_pad / 32][16 pairs][16 lanes][2]
  float* o;              // [unit][16 lanes][dim_pad], dims in the order of weave_values
  uint16_t* k;           // [64][dim_pad], where not in place
  uint16_t* v;           // [32 pairs][dim_pad][2]
  float* scores[2];      // [64][16 lanes, or 4]
  uint16_t* p;           // [16 lanes][64]

  int64_t units() const { return tiles * (task->head_end - task->head_begin); }
  int64_t head(int64_t unit) const { return task->head_begin + unit / tiles; }
  int64_t lane(int64_t unit) const { return unit % tiles * 16; }
};

struct alignas(64) Lanes {
  float max[16], sum[16], position[16];
  int64_t position_min, position_max;
};

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

// Where a lane's row and head are in q and out, in heads.
static int64_t place(const Work& w, int64_t unit, int64_t lane) {
  return w.head(unit) * w.group + lane % w.group;
}

// The queries of a unit as pairs of dims by lanes; lanes that do not exist are zero.
static void load_queries(const Work& w, int64_t unit) {
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t lane = w.lane(unit) + i;
      r[i] = _mm512_setzero_si512();
      if (lane >= w.lanes) continue;
      const float* q = w.call->q + (w.task->row_begin + lane / w.group) * w.call->q_stride +
                       place(w, unit, lane) * w.dim + d;
      const __m512 low = _mm512_maskz_loadu_ps(first(w.dim - d), q);
      const __m512 high = _mm512_maskz_loadu_ps(first(w.dim - d - 16), q + 16);
      r[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    transpose(r);
    char* to = w.q + unit * w.dim_pad * 32 + d * 32;
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, r[i]);
  }
}

static void open_unit(const Work& w, int64_t unit, Lanes& lanes) {
  load_queries(w, unit);
  std::memset(w.o + unit * 16 * w.dim_pad, 0, static_cast<size_t>(w.dim_pad) * 64);
  const int64_t begin = w.lane(unit), n = std::min<int64_t>(16, w.lanes - begin);
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t lane = begin + std::min(i, n - 1);
    lanes.max[i] = -INFINITY;
    lanes.sum[i] = 0.0f;
    lanes.position[i] = static_cast<float>(w.task->positions[lane / w.group]);
  }
  lanes.position_min = w.task->positions[begin / w.group];
  lanes.position_max = w.task->positions[(begin + n - 1) / w.group];
}

// Where the rows of a block begin in the pages of K and V, for head 0. One division a block: there
// is none in the loops over keys.
struct Block {
  int64_t begin, n;
  const uint16_t* k[key_block];
  const uint16_t* v[key_block];
};

static void find_rows(const Work& w, int64_t begin, Block& block) {
  const PageShape &k = w.call->k_shape, &v = w.call->v_shape;
  const int64_t row_len = k.heads * k.dim;
  block.begin = begin;
  block.n = std::min(key_block, w.limit - begin);
  int64_t page = begin / k.page_size, offset = begin - page * k.page_size;
  for (int64_t i = 0; i < block.n; ++i) {
    const int64_t id = w.pages[page], in_page = offset * row_len;
    block.k[i] = static_cast<const uint16_t*>(w.call->k) + id * k.page_stride + in_page;
    block.v[i] = static_cast<const uint16_t*>(w.call->v) + id * v.page_stride + in_page;
    if (++offset == k.page_size) {
      offset = 0;
      ++page;
    }
  }
}

// Rows of a few hundred bytes, scattered by page, are more than the processor foresees. In assembly
// because GCC drops a loop of nothing but prefetches.
static void prefetch(const Work& w, const Block& block) {
  const int64_t from = w.task->head_begin * w.dim;
  const int64_t end = w.task->head_end * w.dim;
  for (int64_t i = 0; i < block.n; ++i) {
    for (int64_t d = from; d < end; d += 32) {
      __asm__ volatile("prefetcht1 %0" ::"m"(block.k[i][d]));
      __asm__ volatile("prefetcht1 %0" ::"m"(block.v[i][d]));
    }
  }
}

static void gather_keys(const Work& w, int64_t head, const Block& block) {
  for (int64_t i = 0; i < block.n; ++i) {
    const uint16_t* from = block.k[i] + head * w.dim;
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
static void weave_values(const Work& w, int64_t head, const Block& block) {
  const int64_t n = block.n;
  for (int64_t i = 0; i < key_block; i += 2) {
    uint16_t* to = w.v + i * w.dim_pad;
    if (i >= n) {
      std::memset(to, 0, static_cast<size_t>(w.dim_pad) * 4);
      continue;
    }
    const bool pair = i + 1 < n;
    const uint16_t* even = block.v[i] + head * w.dim;
    const uint16_t* odd = pair ? block.v[i + 1] + head * w.dim : even;
    const __mmask32 with_odd = pair ? 0xffffffffu : 0u;
    for (int64_t d = 0; d < w.dim_pad; d += 32) {
      const __mmask32 mask = w.dim - d >= 32 ? 0xffffffffu : 0xffffu;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + d);
      const __m512i b = _mm512_maskz_loadu_epi16(mask & with_odd, odd + d);
      _mm512_store_si512(to + d * 2, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + d * 2 + 32, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// scores[key][lane], unscaled, of four times sixteen keys. Wide: tiles 0..3 scores, 4 keys,
// 5 queries.
static void score_wide(const Work& w, const uint16_t* const* k, int64_t stride, const char* q,
                       float* scores) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    tile_load<5>(q + d * 32, 64);
    tile_load<4>(k[0] + d, stride);
    tile_multiply<0, 4, 5>();
    tile_load<4>(k[1] + d, stride);
    tile_multiply<1, 4, 5>();
    tile_load<4>(k[2] + d, stride);
    tile_multiply<2, 4, 5>();
    tile_load<4>(k[3] + d, stride);
    tile_multiply<3, 4, 5>();
  }
  tile_store<0>(scores, 64);
  tile_store<1>(scores + 256, 64);
  tile_store<2>(scores + 512, 64);
  tile_store<3>(scores + 768, 64);
}

// Narrow: tiles 0, 1, 5 and 7 scores, 2 keys, 3 queries.
static void score_narrow(const Work& w, const uint16_t* const* k, int64_t stride, const char* q,
                         float* scores) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<5>();
  tile_zero<7>();
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    tile_load<3>(q + d * 32, 64);
    tile_load<2>(k[0] + d, stride);
    tile_multiply<0, 2, 3>();
    tile_load<2>(k[1] + d, stride);
    tile_multiply<1, 2, 3>();
    tile_load<2>(k[2] + d, stride);
    tile_multiply<5, 2, 3>();
    tile_load<2>(k[3] + d, stride);
    tile_multiply<7, 2, 3>();
  }
  tile_store<0>(scores, 16);
  tile_store<1>(scores + 64, 16);
  tile_store<5>(scores + 128, 16);
  tile_store<7>(scores + 192, 16);
}

template <bool narrow>
static void score_block(const Work& w, int64_t unit, const Block& block, float* scores) {
  const int64_t stride = w.in_place ? w.call->k_shape.heads * w.dim * 2 : w.dim_pad * 2;
  const uint16_t* k[4];
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t from = i * 16 < block.n ? i * 16 : 0;  // any keys will do: they are masked
    k[i] = w.in_place ? block.k[from] + w.head(unit) * w.dim : w.k + from * w.dim_pad;
  }
  const char* q = w.q + unit * w.dim_pad * 32;
  narrow ? score_narrow(w, k, stride, q, scores) : score_wide(w, k, stride, q, scores);
}

#include "amx_soften.inc"

// o = o * scale + P V. Tiles as configured: output C, weights P, values B.
template <int C, int P, int B>
static void weigh_block(const Work& w, int64_t unit, V scale, int64_t lanes) {
  float* o = w.o + unit * 16 * w.dim_pad;
  if (_mm512_cmp_ps_mask(scale.v, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) & first(lanes)) {
    alignas(64) float scales[16];
    store(scales, scale);
    for (int64_t i = 0; i < lanes; ++i) {
      const V by = all(scales[i]);
      for (int64_t d = 0; d < w.dim_pad; d += 16) {
        store(o + i * w.dim_pad + d, load(o + i * w.dim_pad + d) * by);
      }
    }
  }
  const int64_t o_stride = w.dim_pad * 4;
  for (int64_t d = 0; d < w.dim_pad; d += 16) {
    tile_load<C>(o + d, o_stride);
    for (int64_t key = 0; key < key_block; key += 32) {
      tile_load<P>(w.p + key, key_block * 2);
      tile_load<B>(w.v + key * w.dim_pad + d * 2, o_stride);
      tile_multiply<C, P, B>();
    }
    tile_store<C>(o + d, o_stride);
  }
}

static void close_unit(const Work& w, int64_t unit, const Lanes& lanes) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const int64_t begin = w.lane(unit), n = std::min<int64_t>(16, w.lanes - begin);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t lane = begin + i;
    const float* o = w.o + (unit * 16 + i) * w.dim_pad;
    float* out = w.call->out + ((w.task->row_begin + lane / w.group) * w.call->heads +
                                place(w, unit, lane)) * w.dim;
    const V sum = all(lanes.sum[i]);
    for (int64_t d = 0; d < w.dim_pad; d += 32) {
      const V a = load(o + d) / sum, b = load(o + d + 16) / sum;
      _mm512_mask_storeu_ps(out + d, first(w.dim - d), _mm512_permutex2var_ps(a.v, low, b.v));
      _mm512_mask_storeu_ps(out + d + 16, first(w.dim - d - 16),
                            _mm512_permutex2var_ps(a.v, high, b.v));
    }
  }
}

template <bool narrow>
static void run_block(const Work& w, Lanes* lanes, const Block& block) {
  const int64_t begin = block.begin, units = w.units();
  int64_t gathered = -1, woven = -1, which = 0;
  // The next unit that sees this block, its scores under way.
  const auto start = [&](int64_t u, float* scores) {
    while (u < units && begin > lanes[u].position_max) ++u;
    if (u == units) return u;
    if (!w.in_place && gathered != w.head(u)) {
      gathered = w.head(u);
      gather_keys(w, gathered, block);
    }
    score_block<narrow>(w, u, block, scores);
    return u;
  };
  int64_t u = start(0, w.scores[0]);
  while (u < units) {
    // The tile unit works on the next scores while these become weights.
    const int64_t after = start(u + 1, w.scores[which ^ 1]);
    const int64_t keys = std::min(block.n, lanes[u].position_max + 1 - begin);
    const V scale = narrow ? soften_narrow(w, lanes[u], begin, w.scores[which])
                           : soften_wide(w, lanes[u], begin, keys, w.scores[which]);
    if (woven != w.head(u)) {
      woven = w.head(u);
      weave_values(w, woven, block);
    }
    narrow ? weigh_block<4, 6, 2>(w, u, scale, 4) : weigh_block<6, 4, 5>(w, u, scale, 16);
    u = after;
    which ^= 1;
  }
}

template <bool narrow>
static void run(const Work& w, Lanes* lanes) {
  Block blocks[2];
  find_rows(w, 0, blocks[0]);
  prefetch(w, blocks[0]);
  for (int64_t u = 0; u < w.units(); ++u) open_unit(w, u, lanes[u]);
  for (int64_t begin = 0, i = 0; begin < w.limit; begin += key_block, i ^= 1) {
    if (begin + key_block < w.limit) {
      find_rows(w, begin + key_block, blocks[i ^ 1]);
      prefetch(w, blocks[i ^ 1]);
    }
    run_block<narrow>(w, lanes, blocks[i]);
  }
  for (int64_t u = 0; u < w.units(); ++u) close_unit(w, u, lanes[u]);
}

// Wide: every tile is sixteen rows of 64 bytes. Narrow: scores are 16 keys by 4 lanes, outputs 4
// lanes by 16 dims.
static void configure(bool narrow) {
  const int64_t rows[8] = {16, 16, 16, 16, 4, 16, 4, 16}, bytes[8] = {16, 16, 64, 16, 64, 16, 64, 16};
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.set(i, narrow ? rows[i] : 16, narrow ? bytes[i] : 64);
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
  w.tiles = (w.lanes + 15) / 16;
  w.limit = task.limit();
  w.factor = call.scale * 1.44269504f;
  w.pages = call.page_table + task.sequence * call.pages_max;
  w.in_place = call.k_shape.page_size % 16 == 0 && w.dim == w.dim_pad;
  const int64_t q_bytes = w.units() * w.dim_pad * 32, o_bytes = w.units() * w.dim_pad * 64;
  w.q = static_cast<char*>(thread_scratch(scratch_rows, q_bytes + o_bytes));
  w.o = reinterpret_cast<float*>(w.q + q_bytes);
  w.k = static_cast<uint16_t*>(thread_scratch(scratch_keys, key_block * w.dim_pad * 2));
  w.v = static_cast<uint16_t*>(thread_scratch(scratch_values, key_block * w.dim_pad * 2));
  float* scores = static_cast<float*>(thread_scratch(scratch_scores, key_block * (128 + 32)));
  w.scores[0] = scores;
  w.scores[1] = scores + key_block * 16;
  w.p = reinterpret_cast<uint16_t*>(scores + key_block * 32);
  auto* lanes = static_cast<Lanes*>(
      thread_scratch(scratch_out, w.units() * static_cast<int64_t>(sizeof(Lanes))));
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8000);  // flush denormal results
  const bool narrow = w.lanes <= 4;
  configure(narrow);
  narrow ? run<true>(w, lanes) : run<false>(w, lanes);
  tile_release();
  _mm_setcsr(mode);
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
