// Operations on one row at a time: norm, rope, gated activation, embedding. All float32, and a
// row's bits depend on that row alone.
#pragma once

#include <cstdint>

#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// x is [rows, heads, dim], rows x_stride floats apart; y contiguous. Each head is normed by itself.
struct Norm {
  const float* x;
  int64_t x_stride;
  const float* residual;  // null, or added to x first; heads == 1 then
  float* total;           // x + residual, where residual is given
  const float* weight;    // [dim]
  float* y;
  int64_t rows, heads, dim;
  float eps;
};
void rms_norm(Team& team, const Norm& call);

// Half-split rotation in place of the first `rot` of `dim`; cos_sin is [positions, rot].
struct Rope {
  float* q;
  float* k;
  int64_t q_stride, k_stride, q_heads, k_heads, rows, dim, rot;
  const int32_t* positions;
  const float* cos_sin;
};
void rope(Team& team, const Rope& call);

void add(Team& team, const float* x, const float* y, float* out, int64_t n);
// gate_up [rows, 2 * dim] -> out [rows, dim]: silu(gate) * up.
void silu_mul(Team& team, const float* gate_up, float* out, int64_t rows, int64_t dim);
void embed(Type type, const void* table, int64_t dim, const int64_t* ids, int64_t rows, float* out);

}  // namespace aserve
