// Attention on AMX tiles, for bfloat16 and int8 pages. Scores are taken as K Q^T: K rows lie in the
// pages as the unit wants its left operand, and a softmax over keys then runs down lanes, without a
// shuffle. Outputs are taken as V^T P^T: a segment's values are turned once, and serve all lanes. For
// few lanes it is P V, which is the same products and sums.
// A lane is a (query row, head of the group) pair, sixteen to a tile.
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

// From so many units of a head on, a segment's values are turned once instead of each one's weights.
constexpr int64_t units_turned = 4;

// Sixteen lanes of each KV head: of consecutive rows, or of one where each has its own keys.
struct alignas(64) Unit {
  float position[16], first[16];  // keys from first to position are seen
  int64_t base, n;                // lanes, counted from the task's first row
  int64_t position_min, position_max, first_min, first_max;
};

// The task in the units of the loops. dim_pad is dim rounded up to 32, with zeros after dim.
struct Work {
  const AttentionTask* task;
  const Attention* call;
  int64_t dim, dim_pad, group, head_bytes;
  int64_t units;  // of one KV head
  int64_t room;   // lanes that a unit has room for in the products: 16, or 4
  bool woven;     // values are only woven, and it is the weights that are turned
  float factor;   // scale * log2(e)
  const int32_t* pages;
  bool in_place;  // sixteen keys of a segment always lie in one page, unpadded
  Unit* unit;
  char* q;                       // [head][unit][dim_pad / 32][16 pairs][16 lanes][2]
  float* states;                 // [head][unit][state_len]
  float* parts;                  // [2][state_len]
  const char* tile[16];          // of sixteen keys each
  int64_t tile_stride[16];       // bytes from a key to the next
  uint16_t* k;                   // [256][dim_pad], where not in place
  uint16_t* v;                   // [8 groups][dim_pad][32], or [8 groups][16 pairs][dim_pad][2]
  uint16_t* held;                // [32][dim_pad], values on their way there
  float *k_scale, *v_scale;      // [256] of int8, or null
  float* scores;                 // [2][256][16 lanes, or 4]
  uint16_t* p;                   // [2], see Stage

  int64_t heads() const { return task->head_end - task->head_begin; }
  int64_t state_len() const { return (dim_pad + 2) * 16; }
  int64_t number(int64_t head, int64_t u) const { return (head - task->head_begin) * units + u; }
  const char* q_of(int64_t head, int64_t u) const { return q + number(head, u) * dim_pad * 32; }
  float* state_of(int64_t head, int64_t u) const { return states + number(head, u) * state_len(); }
};

static inline __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

#include "amx_keys.inc"

#include "amx_soften.inc"

#include "amx_products.inc"

static void open_unit(const Work& w, int64_t u) {
  Unit& unit = w.unit[u];
  const int64_t rows = w.task->row_end - w.task->row_begin;
  const int64_t each = (w.group + 15) / 16;  // units of a row with its own keys
  unit.base = w.task->by_row ? u / each * w.group + u % each * 16 : u * 16;
  const int64_t end = w.task->by_row ? (u / each + 1) * w.group : rows * w.group;
  unit.n = std::min<int64_t>(16, end - unit.base);
  unit.position_min = unit.first_min = INT64_MAX;
  unit.position_max = unit.first_max = 0;
  for (int64_t i = 0; i < 16; ++i) {
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
static void load_queries(const Work& w, int64_t head, int64_t u) {
  const Unit& unit = w.unit[u];
  for (int64_t d = 0; d < w.dim_pad; d += 32) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t lane = unit.base + i;
      r[i] = _mm512_setzero_si512();
      if (i >= unit.n) continue;
      const float* q = w.call->q + (w.task->row_begin + lane / w.group) * w.call->q_stride +
                       (head * w.group + lane % w.group) * w.dim + d;
      const __m512 low = _mm512_maskz_loadu_ps(first(w.dim - d), q);
      const __m512 high = _mm512_maskz_loadu_ps(first(w.dim - d - 16), q + 16);
      r[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    transpose(r);
    char* to = w.q + w.number(head, u) * w.dim_pad * 32 + d * 32;
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, r[i]);
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

static void close_unit(const Work& w, int64_t head, int64_t u) {
  const Unit& unit = w.unit[u];
  const AttentionMerge* merge = w.task->merge;
  float* state = w.state_of(head, u);
  if (unit.first_min >= w.task->key_end) return;  // it saw nothing before its window
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

// Units of a task, segment by segment and head by head: each is scored, softened and weighed, three
// units at a time, one in each stage. Values are laid where they are first softened, over those of
// the head before, which is weighed just ahead.
struct Pipeline {
  Pipeline(Work& work, Stream& rows) : w(work), stream(rows) {}

  Work& w;
  Stream& stream;
  Stage stages[3];
  Stage *softened = nullptr, *weighed = nullptr;
  int64_t begun = 0;                 // units
  int64_t laid_item = -1, laid = 0;  // groups of values, of which segment and head

  bool to_slots() const { return w.task->merge != nullptr && !w.task->folds; }
  bool sees(const Segment& segment, int64_t u) const {
    const Unit& unit = w.unit[u];
    return segment.begin <= unit.position_max && segment.begin + segment.n > unit.first_min;
  }
  void open(const Segment& segment, int64_t head, int64_t u, Stage& stage) {
    const Unit& unit = w.unit[u];
    const int64_t odd = begun++ & 1;
    stage.segment = &segment;
    stage.head = head;
    stage.u = u;
    stage.item = segment.ordinal * w.heads() + head - w.task->head_begin;
    stage.begin = segment.begin;
    stage.n = std::min(segment.n, unit.position_max + 1 - segment.begin);
    stage.from = std::max<int64_t>(0, unit.first_min - segment.begin) / 32;
    stage.end = (stage.n + 31) / 32;
    stage.clear_from = unit.first_max - segment.begin;
    stage.clear_end = unit.position_min + 1 - segment.begin;
    stage.is_first = segment.begin <= std::max(unit.first_min, w.task->key_begin);
    stage.slot = w.task->slot + segment.ordinal;
    stage.scores = w.scores + odd * key_segment * 16;
    stage.p = w.p + odd * key_segment * 16;
    const bool own = stage.is_first && !to_slots();
    stage.state = own ? w.state_of(head, u) : w.parts + odd * w.state_len();
    for (V& top : stage.top) top = all(no_max);
  }
  void lay_upto(const Stage& stage, int64_t end) {
    if (laid_item != stage.item) laid = 0;
    laid_item = stage.item;
    for (; laid < end; ++laid) {
      lay_values(w, stage.head, *stage.segment, laid);
    }
  }
  // Any of the three may be missing.
  void beat(Stage* scored) {
    if (softened != nullptr) open_softmax(w, *softened);
    if (weighed != nullptr) open_outputs();
    const char* q = scored != nullptr ? w.q_of(scored->head, scored->u) : nullptr;
    for (int64_t g = 0; g < Stream::groups; ++g) {
      if (scored != nullptr && scored->has(g)) {
        stream.upto(scored->item, 2 * g);
        w.woven ? score_woven(w, q, g, scored->scores) : score_turned(w, q, g, scored->scores);
        find_top(w, *scored, g);
        stream.upto(scored->item, 2 * g + 1);
      }
      if (weighed != nullptr && weighed->has(g)) {
        w.woven ? weigh_woven(w, weighed->p, g, 0) : weigh_turned(w, weighed->p, g, 0);
      }
      if (softened != nullptr && softened->has(g)) {
        lay_upto(*softened, g + 1);
        w.room == 4 ? soften_narrow(w, *softened, g) : soften_wide(w, *softened, g);
      }
    }
    if (softened != nullptr) close_softmax(w, *softened);
    if (weighed != nullptr) settle(*weighed);
    weighed = softened;
    softened = scored;
  }
  void settle(const Stage& stage) {
    store_outputs(w, 0, stage.state + 32);
    for (int64_t d = 64; d < w.dim_pad; d += 64) {
      open_outputs();
      for (int64_t g = stage.from; g < stage.end; ++g) {
        w.woven ? weigh_woven(w, stage.p, g, d) : weigh_turned(w, stage.p, g, d);
      }
      store_outputs(w, d, stage.state + 32);
    }
    if (to_slots()) {
      store_lanes(w, stage.head, w.unit[stage.u], stage.state, true,
                  [&](int64_t row, int64_t at) { return w.task->merge->at(stage.slot, row, at); });
    } else if (!stage.is_first) {
      fold_state(w.state_of(stage.head, stage.u), stage.state, w.dim_pad);
    }
  }
  void drain() {
    while (softened != nullptr || weighed != nullptr) beat(nullptr);
  }
  void run(const Segment& segment, int64_t head) {
    // Of larger heads what is beyond 64 dims is weighed last, when others' values may not be there.
    if (w.dim_pad > 64) drain();
    lay_keys(w, head, segment, 0, !w.in_place);
    for (int64_t u = 0; u < w.units; ++u) {
      if (!sees(segment, u)) continue;
      Stage& stage = stages[begun % 3];
      open(segment, head, u, stage);
      beat(&stage);
    }
  }
  // Rows that have their own keys from somewhere in the segment on.
  void run_by_row(const Segment& segment, int64_t head) {
    Segment own = segment;
    lay_keys(w, head, segment, 0, !w.in_place);
    const int64_t each = (w.group + 15) / 16;
    for (int64_t u = 0; u < w.units; ++u) {
      if (!sees(segment, u)) continue;
      Stage& stage = stages[0];
      open(segment, head, u, stage);
      const KeyPlaces places = key_places(*w.call, w.task->row_begin + u / each);
      const int64_t shared = std::max<int64_t>(0, places.start - segment.begin) / 32;
      const int64_t end = std::min(shared, stage.end);
      lay_upto(stage, end);
      own.n = stage.n;
      find_rows(w, places, shared * 32, own);
      lay_keys(w, head, own, shared, true);
      for (int64_t g = shared; g < stage.end; ++g) lay_values(w, head, own, g);
      laid = Stream::groups;  // these; of the shared ones the next row's still hold
      beat(&stage);
      drain();
      laid = end;
    }
  }
};

static void run(Work& w) {
  const AttentionTask& task = *w.task;
  const KeyPlaces plain{nullptr, INT64_MAX};
  // One that is scored, one whose values are laid, one whose rows are fetched.
  Segment segments[3];
  Stream stream{w, segments};
  const auto open = [&] {
    const int64_t begin = task.key_begin + stream.opened * key_segment;
    if (begin >= task.key_end) return;
    Segment& segment = segments[stream.opened % 3];
    segment.ordinal = stream.opened++;
    segment.begin = begin;
    segment.n = std::min(key_segment, task.key_end - begin);
    // Of rows with their own keys what is before the tree, and any places after it.
    find_rows(w, plain, 0, segment);
  };
  open();
  open();
  stream.upto(0, 0);
  for (int64_t u = 0; u < w.units; ++u) {
    for (int64_t head = task.head_begin; head < task.head_end; ++head) load_queries(w, head, u);
  }
  Pipeline pipeline(w, stream);
  for (int64_t i = 0; i < stream.opened; ++i) {
    const Segment& segment = segments[i % 3];
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
      task.by_row ? pipeline.run_by_row(segment, head) : pipeline.run(segment, head);
    }
    open();
  }
  pipeline.drain();
  if (task.merge != nullptr && !task.folds) return;
  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    for (int64_t u = 0; u < w.units; ++u) close_unit(w, head, u);
  }
}

static void allot(Work& w) {
  const int64_t all_units = w.units * (w.task->head_end - w.task->head_begin);
  const int64_t q_bytes = all_units * w.dim_pad * 32, state_bytes = w.state_len() * 4;
  char* rows = static_cast<char*>(
      thread_scratch(scratch_rows, q_bytes + (all_units + 2) * state_bytes));
  w.q = rows;
  w.states = reinterpret_cast<float*>(rows + q_bytes);
  w.parts = w.states + all_units * w.state_len();
  const int64_t value_bytes = key_segment * w.dim_pad * 2;
  char* keys = static_cast<char*>(thread_scratch(scratch_keys, value_bytes + key_segment * 4));
  const int64_t held_bytes = 32 * w.dim_pad * 2;
  char* values = static_cast<char*>(
      thread_scratch(scratch_values, value_bytes + held_bytes + key_segment * 4));
  w.k = reinterpret_cast<uint16_t*>(keys);
  w.held = reinterpret_cast<uint16_t*>(values);
  values += held_bytes;
  w.v = reinterpret_cast<uint16_t*>(values);
  const bool scaled = w.call->type == Type::i8;
  w.k_scale = scaled ? reinterpret_cast<float*>(keys + value_bytes) : nullptr;
  w.v_scale = scaled ? reinterpret_cast<float*>(values + value_bytes) : nullptr;
  w.scores = static_cast<float*>(thread_scratch(scratch_scores, key_segment * 16 * (8 + 4)));
  w.p = reinterpret_cast<uint16_t*>(w.scores + key_segment * 32);
  w.unit = static_cast<Unit*>(
      thread_scratch(scratch_out, w.units * static_cast<int64_t>(sizeof(Unit))));
}

}  // namespace

bool amx_attention_fits(const Attention& call) {
  return call.type != Type::f32 && call.dim() % 16 == 0;
}

void amx_attention(const AttentionTask& task) {
  const Attention& call = *task.call;
  Work w{};
  w.task = &task;
  w.call = &call;
  w.dim = call.dim();
  w.dim_pad = (w.dim + 31) / 32 * 32;
  w.head_bytes = call.k_shape.dim * type_bytes(call.type);
  w.group = task.group();
  const int64_t rows = task.row_end - task.row_begin;
  w.units = task.by_row ? rows * ceil_div(w.group, 16) : ceil_div(rows * w.group, 16);
  w.room = w.group <= 4 && (task.by_row || rows * w.group <= 4) ? 4 : 16;
  w.woven = w.room == 4 || w.units < units_turned;
  w.factor = call.scale * log2_e;
  w.pages = call.page_table + task.sequence * call.pages_max;
  w.in_place = call.type == Type::bf16 && call.k_shape.page_size % 16 == 0 && w.dim == w.dim_pad;
  allot(w);
  for (int64_t u = 0; u < w.units; ++u) open_unit(w, u);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8000);  // flush denormal results
  configure(w);
  run(w);
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
