// What the linears on AMX tiles share: rows packed as tiles, and what becomes of a finished tile.
// Private to csrc/cpu.
#pragma once

#include <cstdint>

#include "aserve/linear.h"

namespace aserve {

constexpr int64_t amx_tile = 1024;  // bytes: 16 outputs of 32 bfloat16, or of 16 float32

// [m / 16][k tile][16 pairs of k][16 rows][2] bfloat16: the B tile of a product, whose A tile is the
// weight's. Rows that there are not are zero; k as the weight pads it.
struct AmxRows {
  int64_t m, k_tiles;
  char* tiles;

  int64_t row_tiles() const { return (m + 15) / 16; }
  int64_t rows_of(int64_t tile) const { return tile * 16 + 16 <= m ? 16 : m - tile * 16; }
  char* row_tile(int64_t i) const { return tiles + i * k_tiles * amx_tile; }
};

// One thread's work: tiles of rows by panels of the weight. Sums go to `y`, or those of a gate and of
// the up it is multiplied with, half of the panels further on, to `hidden`, the rows of another
// linear.
struct AmxTask {
  const Weight* weight;
  AmxRows rows;
  int64_t row_begin, row_end, panel_begin, panel_end;
  float* y;                // [m, n], of the whole linear
  int64_t part_step;       // as in linear()
  const AmxRows* hidden;   // null: y
};

void amx_run(const AmxTask& task);

}  // namespace aserve
