#include "aserve/linear.h"

#include <algorithm>

#include "aserve/index.h"
#include "kernels.h"

namespace aserve {
namespace {

// Calls visit(k, at) for each input k of output n, `at` in elements from the start of the weight.
template <class Visit>
void walk_row(const Weight& w, int64_t n, const Visit& visit) {
  const bool pairs = w.type == Type::bf16;
  for (int64_t part = 0; part < w.row_blocks; ++part) {
    const int64_t first = part * w.k_block;
    const int64_t base = (n / 16 * w.k_pad() + part * w.k_block_pad) * 16;
    for (int64_t k = 0; k < w.k_block; ++k) {
      const int64_t at = pairs ? k / 2 * 32 + n % 16 * 2 + k % 2 : k * 16 + n % 16;
      visit(first + k, base + at);
    }
  }
}

template <class T>
void pack_block(const Weight& w, const T* source, int64_t block, T* packed) {
  T* to = packed + block * 16 * w.k_pad();
  std::fill(to, to + 16 * w.k_pad(), T{0});
  const int64_t end = std::min(w.n, block * 16 + 16);
  for (int64_t n = block * 16; n < end; ++n) {
    const T* row = source + n * w.k;
    walk_row(w, n, [&](int64_t k, int64_t at) { packed[at] = row[k]; });
  }
}

}  // namespace

Weight weight_shape(Type type, int64_t n, int64_t k, int64_t row_blocks) {
  Weight w{};
  w.type = type;
  w.n = n;
  w.k = k;
  w.row_blocks = row_blocks;
  w.k_block = k / row_blocks;
  w.k_block_pad = type == Type::bf16 ? ceil_div(w.k_block, 32) * 32 : w.k_block;
  return w;
}

void pack_weight(Team& team, const Weight& w, const void* source, void* packed) {
  team.run(w.n_blocks(), [&](int64_t block) {
    if (w.type == Type::bf16) {
      pack_block(w, static_cast<const uint16_t*>(source), block, static_cast<uint16_t*>(packed));
    } else {
      pack_block(w, static_cast<const float*>(source), block, static_cast<float*>(packed));
    }
  });
}

void unpack_row(const Weight& w, int64_t id, float* row) {
  if (w.type == Type::bf16) {
    const auto* packed = static_cast<const uint16_t*>(w.packed);
    walk_row(w, id, [&](int64_t k, int64_t at) { row[k] = widen(packed[at]); });
  } else {
    const auto* packed = static_cast<const float*>(w.packed);
    walk_row(w, id, [&](int64_t k, int64_t at) { row[k] = packed[at]; });
  }
}

namespace {

void run(Team& team, const Weight& w, const float* x, int64_t m, float* y, int64_t part_step) {
  if (m == 0) return;
#if defined(__x86_64__)
  if (w.type == Type::bf16 && level() == Level::amx) {
    return amx_linear(team, w, x, m, y, part_step);
  }
#endif
  const Kernels& k = kernels();
  if (w.type == Type::bf16) {
    float* rounded = static_cast<float*>(thread_scratch(scratch_rows, m * w.k * 4));
    team.run(ceil_div(m, 64), [&](int64_t i) {
      const int64_t begin = i * 64, rows = std::min<int64_t>(64, m - begin);
      k.round_bf16(x + begin * w.k, rows * w.k, rounded + begin * w.k);
    });
    x = rounded;
  }
  // Few rows: share out the weight finely. Many rows: blocks of both, so that a block of the weight
  // stays in the second cache while the rows of the task pass over it.
  const int64_t rows_task = 64;
  const int64_t blocks_task = std::max<int64_t>(4, std::min<int64_t>(64, w.n_blocks() / 16 / 4 * 4));
  const int64_t row_tasks = ceil_div(m, rows_task), block_tasks = ceil_div(w.n_blocks(), blocks_task);
  team.run(row_tasks * block_tasks, [&](int64_t i) {
    const int64_t row = i % row_tasks * rows_task, block = i / row_tasks * blocks_task;
    k.linear(w, x + row * w.k, std::min(rows_task, m - row), block,
             std::min(block + blocks_task, w.n_blocks()), y + row * w.n, part_step);
  });
}

}  // namespace

void linear(Team& team, const Weight& w, const float* x, int64_t m, float* y) {
  run(team, w, x, m, y, 0);
}

void linear_parts(Team& team, const Weight& w, const float* x, int64_t m, float* parts) {
  run(team, w, x, m, parts, m * w.n);
}

}  // namespace aserve
