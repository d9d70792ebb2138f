// The packed layouts of linear.h, written and read back. Nothing here is in a step but unpack_row.
#include <algorithm>
#include <cstring>

#include "aserve/cpu.h"
#include "aserve/index.h"
#include "aserve/linear.h"
#include "half.h"

namespace aserve {
namespace {

// Calls visit(k, at) for each input k of output n, `at` in elements from the start of the weight.
template <class Visit>
void walk_row(const Weight& w, int64_t n, const Visit& visit) {
  const bool pairs = w.format == Format::bf16, tiled = w.tiled;
  for (int64_t part = 0; part < w.row_blocks; ++part) {
    const int64_t first = part * w.k_block;
    const int64_t base = (n / 16 * w.k_pad() + part * w.k_block_pad) * 16;
    for (int64_t k = 0; k < w.k_block; ++k) {
      const int64_t at = tiled   ? k / 32 * 512 + n % 16 * 32 + k % 32
                         : pairs ? k / 2 * 32 + n % 16 * 2 + k % 2
                                 : k * 16 + n % 16;
      visit(first + k, base + at);
    }
  }
}

template <class T>
void pack_panel(const Weight& w, const T* source, int64_t panel, T* packed) {
  T* to = packed + panel * 16 * w.k_pad();
  std::fill(to, to + 16 * w.k_pad(), T{0});
  const int64_t end = std::min(w.n, panel * 16 + 16);
  for (int64_t n = panel * 16; n < end; ++n) {
    const T* row = source + n * w.k;
    walk_row(w, n, [&](int64_t k, int64_t at) { packed[at] = row[k]; });
  }
}

// Where in a block the value of a k of an output stands: its byte, and for nibbles the bits below it.
struct Place {
  int64_t byte;
  int shift;
};
Place place(const Weight& w, int64_t k, int64_t output) {
  if (w.format == Format::q8) {
    return {w.tiled ? output * 32 + k : k / 2 * 32 + output * 2 + k % 2, 0};
  }
  const int64_t word = w.tiled ? k : output * 2 + k % 2, from = w.tiled ? output : k / 2;
  const int nibble = static_cast<int>(from % 4);
  return {from / 4 * 64 + word * 2 + nibble / 2, nibble % 2 * 4};
}

// The values of a block of a panel, and its scale and minimum for an output.
struct BlockAt {
  int64_t values, scale, minimum;
};
BlockAt block_at(const Weight& w, int64_t tile, int64_t output) {
  if (w.tiled) {
    const int64_t record = tile * record_bytes(w.format);
    const int64_t scale = record + value_bytes(w.format) + output * 2;
    return {record, scale, scale + 32};
  }
  const int64_t scale = (tile * 16 + output) * 2;
  return {tile * value_bytes(w.format), w.scales_at() + scale, w.minima_at() + scale};
}

// One block of a file into its place; the value of k and of k + 16 share a byte there.
void pack_block(const Weight& w, const uint8_t* from, int64_t tile, int64_t output, char* panel) {
  const bool has_minimum = w.format == Format::q4m;
  const BlockAt at = block_at(w, tile, output);
  std::memcpy(panel + at.scale, from, 2);
  if (has_minimum) std::memcpy(panel + at.minimum, from + 2, 2);
  from += has_minimum ? 4 : 2;
  char* to = panel + at.values;
  for (int64_t k = 0; k < 32; ++k) {
    const Place one = place(w, k, output);
    if (w.format == Format::q8) {
      to[one.byte] = static_cast<char>(from[k]);
    } else {
      const int nibble = k < 16 ? from[k] & 15 : from[k - 16] >> 4;
      to[one.byte] = static_cast<char>(to[one.byte] | nibble << one.shift);
    }
  }
}

// The integers of one output in one block, as they are stored.
void unpack_block(const Weight& w, const char* values, int64_t output, float (&q)[32]) {
  for (int64_t k = 0; k < 32; ++k) {
    const Place one = place(w, k, output);
    const char byte = values[one.byte];
    const int nibble = static_cast<uint8_t>(byte) >> one.shift & 15;
    q[k] = static_cast<float>(w.format == Format::q8   ? static_cast<int8_t>(byte)
                              : w.format == Format::q4 ? nibble - 8
                                                       : nibble);
  }
}

float half_at(const char* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return widen_half(bits);
}

void unpack_blocks(const Weight& w, int64_t id, float* row) {
  const char* panel = w.panel(id / 16);
  for (int64_t tile = 0; tile < w.k_tiles(); ++tile, row += 32) {
    const BlockAt at = block_at(w, tile, id % 16);
    float q[32];
    unpack_block(w, panel + at.values, id % 16, q);
    const float d = half_at(panel + at.scale);
    // d * q needs no more bits than float32 has, so that a sum is rounded once.
    const float m = w.format == Format::q4m ? half_at(panel + at.minimum) : 0.0f;
    for (int64_t k = 0; k < 32; ++k) row[k] = w.format == Format::q4m ? d * q[k] + m : d * q[k];
    if (!w.tiled) continue;
    for (int64_t k = 0; k < 32; ++k) row[k] = widen(narrow(row[k]));  // as products have it
  }
}

}  // namespace

Weight weight_shape(Format format, int64_t n, int64_t k, int64_t row_blocks) {
  Weight w{};
  w.format = format;
  w.n = n;
  w.k = k;
  w.row_blocks = row_blocks;
  w.k_block = k / row_blocks;
  w.tiled = format != Format::f32 && level() == Level::amx;
  w.k_block_pad = format == Format::f32 ? w.k_block : ceil_div(w.k_block, 32) * 32;
  return w;
}

void pack_weight(Team& team, const Weight& w, const void* source, void* packed) {
  team.run(w.n_blocks(), [&](int64_t panel) {
    if (w.format == Format::bf16) {
      pack_panel(w, static_cast<const uint16_t*>(source), panel, static_cast<uint16_t*>(packed));
    } else {
      pack_panel(w, static_cast<const float*>(source), panel, static_cast<float*>(packed));
    }
  });
}

void pack_blocks(Team& team, const Weight& w, const uint8_t* source, void* packed) {
  const int64_t bytes = block_bytes(w.format), tiles = w.k_tiles();
  team.run(w.n_blocks(), [&](int64_t panel) {
    char* to = static_cast<char*>(packed) + panel * w.panel_bytes();
    std::memset(to, 0, static_cast<size_t>(w.panel_bytes()));
    const int64_t outputs = std::min<int64_t>(16, w.n - panel * 16);
    for (int64_t output = 0; output < outputs; ++output) {
      const uint8_t* row = source + (panel * 16 + output) * tiles * bytes;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        pack_block(w, row + tile * bytes, tile, output, to);
      }
    }
  });
}

void unpack_row(const Weight& w, int64_t id, float* row) {
  if (is_quantised(w.format)) {
    unpack_blocks(w, id, row);
  } else if (w.format == Format::bf16) {
    const auto* packed = static_cast<const uint16_t*>(w.packed);
    walk_row(w, id, [&](int64_t k, int64_t at) { row[k] = widen(packed[at]); });
  } else {
    const auto* packed = static_cast<const float*>(w.packed);
    walk_row(w, id, [&](int64_t k, int64_t at) { row[k] = packed[at]; });
  }
}

}  // namespace aserve
