// y[m, n] = x[m, k] w[n, k]^T + bias, with w packed once. Bits of a row do not depend on m. Row blocks
// are added left to right and the bias last, so that their sums may be taken elsewhere.
#pragma once

#include <cstdint>

#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// f32 takes x as it is, every other format rounds it to bfloat16. The quantised ones hold, for each
// 32 k of an output, integers q and a float16 scale d, q4m also a float16 minimum m: int8 q, a
// nibble less 8, a nibble. On tiles of AMX they are those of bfloat16(d q + m), rounded to nearest
// even; elsewhere they are summed as
//   acc = fma(d, dot32(q, x), acc), then with a minimum acc = fma(m, sum32(x), acc),
// block by block in the order of k, dot32 and sum32 being float32 sums from zero.
enum class Format { f32 = 0, bf16 = 1, q8 = 2, q4 = 3, q4m = 4 };

inline bool is_quantised(Format format) { return format >= Format::q8; }

// Bytes of 32 k of 16 outputs: the values, then 16 scales, then 16 minima.
constexpr int64_t value_bytes(Format format) {
  return format == Format::f32    ? 2048
         : format == Format::bf16 ? 1024
         : format == Format::q8   ? 512
                                  : 256;
}
constexpr int64_t record_bytes(Format format) {
  return value_bytes(format) + (format < Format::q8 ? 0 : format == Format::q4m ? 64 : 32);
}

// Packed in panels of 16 outputs, one after the other, in one of two ways.
//
// In lanes, for vectors of 16 outputs. float32 and bfloat16: [row block][k] of 16 floats for each k,
// or of 16 pairs for each two k, k of a row block padded with zeros to a multiple of 32. Quantised:
// [block of 32 k][q], then [block][16] scales, then [block][16] minima, then zeros to a multiple of 64
// bytes. The q of a block are [k / 2][output][k % 2]: as they are for q8; for the others as 128 words
// of 16 bits, nibble t of word w of group g (of 32 words) being value w of pair 4 g + t.
//
// In tiles, what AMX takes as its A: [block of 32 k] of records, a record being [output][k] of
// bfloat16 or int8, or of nibbles as 128 words of 16 bits, nibble t of word k of group g (of 32 words)
// being that of output 4 g + t; then the record's scales and minima.
struct Weight {
  Format format;
  bool tiled;            // in tiles; as packed where AMX was in force
  int64_t n, k;
  int64_t row_blocks;    // K is summed block by block, each from zero
  int64_t k_block;       // k / row_blocks
  int64_t k_block_pad;   // of a block, as stored
  const void* packed;
  const float* bias;     // may be null

  int64_t n_blocks() const { return (n + 15) / 16; }
  int64_t k_pad() const { return k_block_pad * row_blocks; }
  int64_t k_tiles() const { return k_pad() / 32; }  // of all but float32

  // Where, in lanes, the scales and minima of a panel begin, and how long a panel is.
  int64_t scales_at() const { return k_tiles() * value_bytes(format); }
  int64_t minima_at() const { return scales_at() + k_tiles() * 32; }
  int64_t panel_bytes() const {
    if (format == Format::f32) return k_pad() * 64;
    return (k_tiles() * record_bytes(format) + 63) / 64 * 64;
  }
  int64_t packed_bytes() const { return n_blocks() * panel_bytes(); }
  const char* panel(int64_t i) const { return static_cast<const char*>(packed) + i * panel_bytes(); }
};

// Fills in k_block and k_block_pad, and how it is packed at the level in force.
Weight weight_shape(Format format, int64_t n, int64_t k, int64_t row_blocks);
// f32 or bf16. `source` is [n, k], rows contiguous; `packed` has packed_bytes(), 64-byte aligned.
void pack_weight(Team& team, const Weight& shape, const void* source, void* packed);
// The others, from the blocks of a GGUF file as they are: Q8_0 for q8, Q4_0 for q4, Q4_1 for q4m.
// `source` is [n] rows of k / 32 blocks each of block_bytes().
void pack_blocks(Team& team, const Weight& shape, const uint8_t* source, void* packed);
inline int64_t block_bytes(Format format) {  // d, m, q as they stand in a block
  return format == Format::q8 ? 34 : format == Format::q4 ? 18 : 20;
}

// y is [m, n]. With a part_step, the sum over each row block alone, without the bias, that many
// floats after that of the one before.
void linear(Team& team, const Weight& weight, const float* x, int64_t m, float* y,
            int64_t part_step = 0);
// y = down(silu(gate(x)) * up(x)), gate being the first half of the outputs of gate_up and up the
// second: bit for bit linear, silu_mul and linear one after the other, whatever the formats.
void gated(Team& team, const Weight& gate_up, const Weight& down, const float* x, int64_t m,
           float* y, int64_t part_step = 0);
// Row `id` of the weight as float32 [k]; d q + m of quantised values, in tiles rounded to bfloat16.
void unpack_row(const Weight& weight, int64_t id, float* row);

}  // namespace aserve
