// The inner kernels of one level, chosen at run time. Private to csrc/cpu.
#pragma once

#include <cstdint>

#include "aserve/attention.h"
#include "aserve/cpu.h"
#include "aserve/linear.h"
#include "aserve/rows.h"

namespace aserve {

// What one task of attention works on: one sequence, some KV heads, some of its query rows.
struct AttentionTask {
  const Attention* call;
  int64_t sequence, head_begin, head_end;
  int64_t row_begin, row_end;  // of q, absolute
  const int32_t* positions;    // of the rows from row_begin on

  int64_t limit() const { return int64_t{positions[row_end - row_begin - 1]} + 1; }  // keys seen
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
  void (*attention)(const AttentionTask&);
  void (*norm)(const Norm&, int64_t row_begin, int64_t row_end);
  void (*rope)(const Rope&, int64_t row_begin, int64_t row_end);
  void (*add)(const float* x, const float* y, float* out, int64_t n);
  void (*silu_mul)(const float* gate_up, float* out, int64_t rows, int64_t dim);
  void (*narrow)(const float* x, int64_t n, uint16_t* y);
  void (*widen)(const uint16_t* x, int64_t n, float* y);
};

extern const Kernels kernels_generic;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

const Kernels& kernels();

// AMX, for all but float32.
void amx_linear(Team& team, const Weight& weight, const float* x, int64_t m, float* y,
                int64_t part_step);
bool amx_gated_fits(const Weight& gate_up, const Weight& down);
void amx_gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
               float* y, int64_t part_step);
bool amx_attention_fits(const Attention& call);
void amx_attention(const AttentionTask& task);

}  // namespace aserve
