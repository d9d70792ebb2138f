// y[m, n] = x[m, k] w[n, k]^T + bias, with w packed once. Bits of a row do not depend on m. Row blocks
// are added left to right and the bias last, so that their sums may be taken elsewhere.
#pragma once

#include <cstdint>

#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// Packed: [n / 16][row block][k], 16 outputs wide. float32: 16 floats for each k; bfloat16: 16
// pairs for each two k, k of a row block padded with zeros to a multiple of 32. That is the B tile
// of AMX, and in 512-bit words what the other levels want too.
struct Weight {
  Type type;
  int64_t n, k;
  int64_t row_blocks;    // K is summed block by block, each from zero
  int64_t k_block;       // k / row_blocks
  int64_t k_block_pad;   // of a block, as stored
  const void* packed;
  const float* bias;     // may be null

  int64_t n_blocks() const { return (n + 15) / 16; }
  int64_t k_pad() const { return k_block_pad * row_blocks; }
  int64_t packed_bytes() const { return n_blocks() * 16 * k_pad() * type_bytes(type); }
};

// Fills in k_block and k_block_pad.
Weight weight_shape(Type type, int64_t n, int64_t k, int64_t row_blocks);
// `source` is [n, k], rows contiguous; `packed` has packed_bytes(), 64-byte aligned.
void pack_weight(Team& team, const Weight& shape, const void* source, void* packed);
void linear(Team& team, const Weight& weight, const float* x, int64_t m, float* y);

// parts[row block, m, n]: the sum over each row block alone, without the bias.
void linear_parts(Team& team, const Weight& weight, const float* x, int64_t m, float* parts);
// Row `id` of the weight as float32 [k].
void unpack_row(const Weight& weight, int64_t id, float* row);

}  // namespace aserve
