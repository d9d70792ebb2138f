// Attention on AMX tiles, for bfloat16 and int8 pages. Scores are taken as K Q^T, as K rows lie in the
// pages as the unit wants its left operand. For many lanes outputs are V^T P^T: a segment's values are
// turned once and serve all lanes. For few it is P V, of values where they lie.
// A lane is a (query row, head of the group) pair; up to sixteen make a unit.
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

#include "attention_fold.inc"

// Up to so many lanes of a head are units of eight.
constexpr int64_t narrow_most = 32;

// Lanes of each KV head: of consecutive rows, or of one where each has its own keys.
struct alignas(64) Unit {
  float position[16], first[16];  // keys from first to position are seen
  int64_t number, base, n;        // lanes, counted from the task's first row
  int64_t position_min, position_max, first_min, first_max;
};

// Sixteen keys, or their values.
struct Tile {
  const char* at;
  int64_t stride, step;  // bytes from a key to the next, and from 32 dims to the next
};

// The task in the units of the loops. dim_pad is dim rounded up to 32, with zeros after dim.
struct Work {
  const AttentionTask* task;
  const Attention* call;
  int64_t dim, dim_pad, group, head_bytes;
  int64_t units;  // of one KV head
  int64_t room;   // lanes that a unit has room for: 4, 8 or 16
  float factor;   // scale * log2(e)
  bool in_place;  // sixteen keys of a segment always lie in one page, unpadded
  Unit* unit;
  char* q;                   // [head][unit][dim_pad / 32][16 pairs][room][2]
  float* states;             // [head][unit], of sixteen lanes [max][sum][dim_pad], else their slots
  float* part;               // of a segment that is to be folded into a state
  float* parts;              // of units of few lanes: outputs of two groups, then of a segment
  uint16_t *k, *v;           // copies of a segment's tiles; of many lanes v[8 groups][dim_pad][32]
  uint16_t* held;            // [32][dim_pad], values on their way there
  float *k_scale, *v_scale;  // [256] of int8, or null
  float* scores;             // [256][room]
  uint16_t* p;               // the weights
  Tile k_tile[16], v_tile[16];

  // Of 32 keys and sixteen lanes. They are used up before the block after the next is begun.
  float* scores_of(int64_t group) const { return scores + (group & 3) * 512; }
  uint16_t* weights_of(int64_t group) const { return p + (dim_pad > 64 ? group : group & 3) * 512; }
  int64_t heads() const { return task->head_end - task->head_begin; }
  int64_t state_len() const { return room == 16 ? (dim_pad + 2) * 16 : room * slot_len(dim); }
  int64_t place(int64_t head, const Unit* u) const {
    return (head - task->head_begin) * units + u->number;
  }
  char* q_of(int64_t head, const Unit* u) const { return q + place(head, u) * dim_pad * 2 * room; }
  float* state_of(int64_t head, const Unit* u) const { return states + place(head, u) * state_len(); }
};

#include "amx_keys.inc"

#include "amx_soften.inc"

#include "amx_products.inc"

#include "amx_narrow.inc"

static void open_unit(const Work& w, int64_t u) {
  Unit& unit = w.unit[u];
  const int64_t rows = w.task->row_end - w.task->row_begin;
  const int64_t each = ceil_div(w.group, w.room);  // units of a row with its own keys
  unit.number = u;
  unit.base = w.task->by_row ? u / each * w.group + u % each * w.room : u * w.room;
  const int64_t end = w.task->by_row ? (u / each + 1) * w.group : rows * w.group;
  unit.n = std::min(w.room, end - unit.base);
  unit.position_min = unit.first_min = INT64_MAX;
  unit.position_max = unit.first_max = 0;
  for (int64_t i = 0; i < w.room; ++i) {
    const int64_t lane = unit.base + std::min(i, unit.n - 1);
    const int64_t position = w.call->positions[w.task->row_begin + lane / w.group];
    const int64_t key = w.task->first_key(position);
    unit.position[i] = static_cast<float>(position);
    unit.first[i] = static_cast<float>(key);
    unit.position_min = std::min(unit.position_min, position);
    unit.position_max = std::max(unit.position_max, position);
    unit.first_min = std::min(unit.first_min, key);
    unit.first_max = std::max(unit.first_max, key);
  }
}

// The queries of a unit as pairs of dims by lanes; lanes that do not exist are zero.
static void load_queries(const Work& w, int64_t head, const Unit& unit) {
  char* to = w.q_of(head, &unit);
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    __m512i r[16];
    for (int64_t i = 0; i < (w.room == 4 ? 4 : 16); ++i) {
      const int64_t lane = unit.base + i;
      r[i] = _mm512_setzero_si512();
      if (i >= unit.n) continue;
      const float* q = w.call->q + (w.task->row_begin + lane / w.group) * w.call->q_stride +
                       (head * w.group + lane % w.group) * w.dim + d;
      const __m512 low = _mm512_maskz_loadu_ps(first(w.dim - d), q);
      const __m512 high = _mm512_maskz_loadu_ps(first(w.dim - d - 16), q + 16);
      r[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    if (w.room == 4) {
      turn_four(r, to + d * 8);
      continue;
    }
    transpose(r);
    for (int i = 0; i < 16; ++i) {
      char* pair = to + d * 2 * w.room + i * 4 * w.room;
      if (w.room == 16) {
        _mm512_store_si512(pair, r[i]);
      } else {
        _mm256_store_si256(reinterpret_cast<__m256i*>(pair), _mm512_castsi512_si256(r[i]));
      }
    }
  }
}

// The lanes of a state, turned, to where `to(row, head)` says; max and sum after them in a slot.
template <class To>
static void store_lanes(const Work& w, int64_t head, const Unit& unit, const float* state,
                        bool slot, const To& to) {
  float* out[16];
  for (int64_t i = 0; i < unit.n; ++i) {
    const int64_t lane = unit.base + i;
    out[i] = to(w.task->row_begin + lane / w.group, head * w.group + lane % w.group);
    if (slot) {
      out[i][slot_max(w.dim)] = state[i];
      out[i][slot_max(w.dim) + 1] = state[16 + i];
    }
  }
  for (int64_t d = 0; d < w.dim; d += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(state + 32 + (d + i) * 16);
    transpose(r);
    for (int64_t i = 0; i < unit.n; ++i) _mm512_storeu_si512(out[i] + d, r[i]);
  }
}

static void close_unit(const Work& w, int64_t head, const Unit& unit) {
  const AttentionMerge* merge = w.task->merge;
  if (unit.first_min >= w.task->key_end) return;  // it saw nothing before its window
  if (w.room < 16) {
    close_narrow(w, head, unit);
    return;
  }
  float* state = w.state_of(head, &unit);
  if (merge != nullptr) {
    store_lanes(w, head, unit, state, true,
                [&](int64_t row, int64_t at) { return merge->at(w.task->slot, row, at); });
    return;
  }
  float sinks[16] = {};
  for (int64_t i = 0; w.call->sinks != nullptr && i < unit.n; ++i) {
    sinks[i] = w.call->sinks[head * w.group + (unit.base + i) % w.group];
  }
  close_state(state, w.dim, w.call->sinks != nullptr ? sinks : nullptr);
  store_lanes(w, head, unit, state, false, [&](int64_t row, int64_t at) {
    return w.call->out + (row * w.call->heads + at) * w.dim;
  });
}

static void attend_wide(const Work& w, Stage& stage, Feed& feed) {
  attend_blocks(w, stage, feed);
  const AttentionTask& task = *w.task;
  if (task.merge != nullptr && !task.folds) {
    store_lanes(w, stage.head, *stage.unit, stage.state, true,
                [&](int64_t row, int64_t at) { return task.merge->at(stage.slot, row, at); });
  } else if (!stage.is_first) {
    fold_state(w.state_of(stage.head, stage.unit), stage.state, w.dim_pad);
  }
}

static void attend_unit(const Work& w, const Segment& segment, int64_t head, const Unit& unit,
                        Feed& feed) {
  if (segment.begin > unit.position_max || segment.begin + segment.n <= unit.first_min) return;
  Stage stage;
  stage.unit = &unit;
  stage.head = head;
  stage.begin = segment.begin;
  stage.n = std::min(segment.n, unit.position_max + 1 - segment.begin);
  stage.from = std::max<int64_t>(0, unit.first_min - segment.begin) / 32;
  stage.end = (stage.n + 31) / 32;
  stage.clear_from = unit.first_max - segment.begin;
  stage.clear_end = unit.position_min + 1 - segment.begin;
  stage.slot = w.task->slot + (segment.begin - w.task->key_begin) / key_segment;
  stage.is_first = segment.begin <= std::max(unit.first_min, w.task->key_begin);
  const bool slots = w.task->merge != nullptr && !w.task->folds;
  stage.state = stage.is_first && !slots ? w.state_of(head, &unit) : w.part;
  switch (w.room) {
    case 4: return Narrow<4>::attend(w, stage, feed);
    case 8: return Narrow<8>::attend(w, stage, feed);
    default: return attend_wide(w, stage, feed);
  }
}

// Rows that have their own keys from somewhere in the segment on.
static void attend_rows(Work& w, Segment& segment, int64_t head, Feed& feed) {
  const int64_t each = ceil_div(w.group, w.room), n = segment.n;
  const KeyPlaces first_row = key_places(*w.call, w.task->row_begin);
  const int64_t shared = std::max<int64_t>(0, first_row.start - segment.begin) / 32;
  segment.n = std::min(n, shared * 32);
  lay(w, head, segment, 0, false);
  for (int64_t u = 0; u < w.units; ++u) {
    if (u % each == 0) {
      segment.n = std::min(n, w.unit[u].position_max + 1 - segment.begin);
      const KeyPlaces places = key_places(*w.call, w.task->row_begin + u / each);
      find_rows(*w.call, w.task->sequence, places, shared * 32, segment);
      lay(w, head, segment, shared, true);
    }
    attend_unit(w, segment, head, w.unit[u], feed);
  }
  segment.n = n;
}

static void allot(Work& w) {
  const int64_t all_units = w.units * w.heads(), state_bytes = w.state_len() * 4;
  const int64_t q_bytes = all_units * w.dim_pad * 2 * w.room;
  char* rows = static_cast<char*>(
      thread_scratch(scratch_rows, q_bytes + (all_units + 1) * state_bytes));
  w.q = rows;
  w.states = reinterpret_cast<float*>(rows + q_bytes);
  w.part = w.states + all_units * w.state_len();
  const int64_t value_bytes = key_segment * w.dim_pad * 2, held_bytes = 32 * w.dim_pad * 2;
  char* keys = static_cast<char*>(thread_scratch(scratch_keys, value_bytes + key_segment * 4));
  char* values = static_cast<char*>(
      thread_scratch(scratch_values, value_bytes + held_bytes + key_segment * 4));
  w.k = reinterpret_cast<uint16_t*>(keys);
  w.held = reinterpret_cast<uint16_t*>(values);
  values += held_bytes;
  w.v = reinterpret_cast<uint16_t*>(values);
  const bool scaled = w.call->type == Type::i8;
  w.k_scale = scaled ? reinterpret_cast<float*>(keys + value_bytes) : nullptr;
  w.v_scale = scaled ? reinterpret_cast<float*>(values + value_bytes) : nullptr;
  const int64_t part_len = (4 + w.dim_pad / 32) * 256;
  w.scores = static_cast<float*>(
      thread_scratch(scratch_scores, (key_segment * 16 * 2 + part_len) * 4));
  w.p = reinterpret_cast<uint16_t*>(w.scores + key_segment * 16);
  w.parts = w.scores + key_segment * 32;
  w.unit = static_cast<Unit*>(
      thread_scratch(scratch_out, w.units * static_cast<int64_t>(sizeof(Unit))));
}

static void open(Work& w, const AttentionTask& task) {
  const Attention& call = *task.call;
  w.task = &task;
  w.call = &call;
  w.dim = call.dim();
  w.dim_pad = (w.dim + 31) / 32 * 32;
  w.head_bytes = call.k_shape.dim * type_bytes(call.type);
  w.group = task.group();
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t lanes = task.by_row ? w.group : rows * w.group;
  w.room = lanes <= 4 ? 4 : lanes <= narrow_most ? 8 : 16;
  w.units = task.by_row ? rows * ceil_div(w.group, w.room) : ceil_div(lanes, w.room);
  w.factor = call.scale * log2_e;
  w.in_place = call.type == Type::bf16 && call.k_shape.page_size % 16 == 0 && w.dim == w.dim_pad;
  allot(w);
}

static void run(Work& w, Feed& feed) {
  const AttentionTask& task = *w.task;
  const int64_t steps = w.heads() * w.units * (w.room < 16 ? 32 : 8);
  for (int64_t begin = task.key_begin; begin < task.key_end; begin += key_segment) {
    Segment& segment = feed.take(steps);
    if (begin == task.key_begin) {
      for (int64_t u = 0; u < w.units; ++u) {
        open_unit(w, u);
        for (int64_t h = task.head_begin; h < task.head_end; ++h) load_queries(w, h, w.unit[u]);
      }
    }
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
      if (task.by_row) {
        attend_rows(w, segment, head, feed);
        continue;
      }
      lay(w, head, segment, 0, false);
      for (int64_t u = 0; u < w.units; ++u) attend_unit(w, segment, head, w.unit[u], feed);
    }
  }
  if (task.merge != nullptr && !task.folds) return;
  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    for (int64_t u = 0; u < w.units; ++u) close_unit(w, head, w.unit[u]);
  }
}

static void configure(int64_t room) {
  if (room < 16) {
    configure_narrow(room);
    return;
  }
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.set(i, 16, 64);
  tile_configure(config);
}

}  // namespace

bool amx_attention_fits(const Attention& call) {
  return call.type != Type::f32 && call.dim() % 16 == 0;
}

void amx_attention(const AttentionTask* tasks, int64_t n) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8000);  // flush denormal results
  Feed feed(tasks, n);
  Work w;
  int64_t room = 0;
  for (int64_t i = 0; i < n; ++i) {
    open(w, tasks[i]);
    if (w.room != room) configure(room = w.room);
    run(w, feed);
  }
  tile_release();
  _mm_setcsr(mode);
}

void amx_attention_merge(const AttentionMerge& merge) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8000);  // as in the tasks
  level_attention_merge(merge);
  _mm_setcsr(mode);
}

}  // namespace aserve

ASERVE_TARGET_END
#endif
