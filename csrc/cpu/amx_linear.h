// What the linears on AMX tiles share: rows packed as tiles, and a stretch of panels over them.
// Private to csrc/cpu.
#pragma once

#include <cstdint>

#include "aserve/linear.h"

namespace aserve {

constexpr int64_t amx_tile = 1024;  // bytes: 16 rows of 32 bfloat16, or of 16 float32

// [m / 16][k tile][16 rows][32] bfloat16, rows after the last undefined; k as the weight pads it.
struct AmxRows {
  int64_t m, k_tiles;
  char* tiles;
  float* sums;  // [m / 16][k tile][16] of each row's 32, where the weight has minima

  int64_t row_tiles() const { return (m + 15) / 16; }
  int64_t rows_of(int64_t tile) const { return tile * 16 + 16 <= m ? 16 : m - tile * 16; }
  char* row_tile(int64_t i) const { return tiles + i * k_tiles * amx_tile; }
  float* sums_of(int64_t i) const { return sums + i * k_tiles * 16; }
};

// One thread's work: row tiles by panels, written from `out` on, `columns` wide at most. Complete
// sums with bias, or those of each row block part_step floats apart.
struct AmxTask {
  const Weight* weight;
  AmxRows rows;
  int64_t row_begin, row_end, panel_begin, panel_end;
  float* out;  // the first row and the first column of the task
  int64_t out_step, columns, part_step;
};

void amx_bf16(const AmxTask& task);
void amx_blocks(const AmxTask& task);

}  // namespace aserve
