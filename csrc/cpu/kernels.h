// The inner kernels of one level, chosen at run time. Private to csrc/cpu.
#pragma once

#include <cstdint>

#include "aserve/attention.h"
#include "aserve/cpu.h"
#include "aserve/linear.h"
#include "aserve/rows.h"

namespace aserve {

// Where a row's keys are: by position, but for the path of a tree's row.
struct KeyPlaces {
  const int32_t* path;  // of the keys from `start` on
  int64_t start;        // no path: beyond all keys

  int64_t at(int64_t key) const { return key < start ? key : start + path[key - start]; }
};

inline KeyPlaces key_places(const Attention& call, int64_t row) {
  if (call.path_start == nullptr) return {nullptr, INT64_MAX};
  const int64_t len = call.path_start[row + 1] - call.path_start[row];
  if (len == 0) return {nullptr, INT64_MAX};
  return {call.paths + call.path_start[row], call.positions[row] + 1 - len};
}

// The state of a (row, head) after some keys is a slot: the sums over its values, not yet divided,
// padded to sixteen; the greatest logit in units of log 2; the sum of the weights. `no_max`, of what
// saw no key, is less than any logit and yet finite: there are differences of it.
constexpr float no_max = -1e30f;
inline int64_t slot_max(int64_t dim) { return (dim + 15) / 16 * 16; }
inline int64_t slot_len(int64_t dim) { return slot_max(dim) + 16; }

// The slots of rows whose segments are several tasks', folded in ascending order by a merge.
struct AttentionMerge {
  const Attention* call;
  int64_t row_begin, row_end, slots_n;
  float* slots;  // [slots_n][rows][heads][slot_len]

  float* at(int64_t slot, int64_t row, int64_t head) const {
    const int64_t rows = row_end - row_begin;
    return slots + ((slot * rows + row - row_begin) * call->heads + head) * slot_len(call->dim());
  }
};

// What one task of attention works on: some query rows of a sequence, some KV heads, some segments
// of the keys. `by_row` are rows of a tree, each with its own keys.
struct AttentionTask {
  const Attention* call;
  int64_t sequence, head_begin, head_end;
  int64_t row_begin, row_end;  // of q, absolute
  int64_t key_begin, key_end;  // of what the rows see; begins with a segment
  bool by_row;
  const AttentionMerge* merge;  // null: the rows' results are what is wanted, not states
  int64_t slot;                 // of the first segment; the next ones follow
  bool folds;                   // all segments into the one slot

  int64_t group() const { return call->heads / call->k_shape.heads; }
  // The first key that a row at a position sees.
  int64_t first_key(int64_t position) const {
    return call->window == 0 || position < call->window ? 0 : position - call->window + 1;
  }
};

// What one task of a linear works on: some rows, already rounded, and some panels of the weight.
struct LinearTask {
  const Weight* weight;
  const float* x;
  const float* sums;  // [rows, k / 32], where the weight has minima
  int64_t rows, panel_begin, panel_end;
  float* y;
  int64_t part_step;  // as in linear()
};

struct Kernels {
  void (*linear)(const LinearTask&);
  // The sums of each 32 of n values.
  void (*sums)(const float* x, int64_t n, float* sums);
  // x -> x rounded to bfloat16 and widened again.
  void (*round_bf16)(const float* x, int64_t n, float* y);
  void (*attention)(const AttentionTask*, int64_t n);  // one after the other
  void (*attention_merge)(const AttentionMerge&);
  void (*norm)(const Norm&, int64_t row_begin, int64_t row_end);
  void (*rope)(const Rope&, int64_t row_begin, int64_t row_end);
  void (*add)(const float* x, const float* y, float* out, int64_t n);
  void (*silu_mul)(const float* gate_up, float* out, int64_t rows, int64_t dim);
  void (*narrow)(const float* x, int64_t n, uint16_t* y);
  void (*widen)(const uint16_t* x, int64_t n, float* y);
  // A head of n values as int8 and then their scale.
  void (*quantise)(const float* x, int64_t n, int8_t* y);
};

extern const Kernels kernels_generic;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

const Kernels& kernels();

// AMX, for weights in tiles.
void amx_linear(Team& team, const Weight& weight, const float* x, int64_t m, float* y,
                int64_t part_step);
bool amx_gated_fits(const Weight& gate_up, const Weight& down);
void amx_gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
               float* y, int64_t part_step);
bool amx_attention_fits(const Attention& call);
void amx_attention(const AttentionTask* tasks, int64_t n);
void amx_attention_merge(const AttentionMerge& merge);

}  // namespace aserve
