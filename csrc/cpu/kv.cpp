#include "aserve/kv.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace aserve {
namespace {

constexpr int64_t bytes_task = 65536;

template <class Work>
void share_slots(Team& team, int64_t rows, int64_t row_bytes, const Work& work) {
  const int64_t step = std::max<int64_t>(1, bytes_task / std::max<int64_t>(1, row_bytes));
  team.run(ceil_div(rows, step), [&](int64_t i) {
    for (int64_t row = i * step; row < std::min(rows, (i + 1) * step); ++row) work(row);
  });
}

}  // namespace

void kv_append(Team& team, const float* x, int64_t x_stride, Type type, void* pool,
               const PageShape& shape, const int32_t* slots, int64_t rows) {
  const Kernels& k = kernels();
  const int64_t row_len = shape.heads * shape.dim;
  share_slots(team, rows, row_len * 4, [&](int64_t row) {
    const int64_t at = slot_offset(shape, slots[row]);
    if (type == Type::bf16) {
      k.narrow(x + row * x_stride, row_len, static_cast<uint16_t*>(pool) + at);
    } else {
      std::memcpy(static_cast<float*>(pool) + at, x + row * x_stride,
                  static_cast<size_t>(row_len) * sizeof(float));
    }
  });
}

void kv_gather(Team& team, Type type, const void* pool, const PageShape& shape,
               const int32_t* slots, int64_t rows, void* out) {
  const int64_t bytes = shape.heads * shape.dim * type_bytes(type);
  share_slots(team, rows, bytes, [&](int64_t row) {
    const int64_t at = slot_offset(shape, slots[row]) * type_bytes(type);
    std::memcpy(static_cast<char*>(out) + row * bytes, static_cast<const char*>(pool) + at,
                static_cast<size_t>(bytes));
  });
}

void kv_scatter(Team& team, Type type, void* pool, const PageShape& shape, const int32_t* slots,
                int64_t rows, const void* in) {
  const int64_t bytes = shape.heads * shape.dim * type_bytes(type);
  share_slots(team, rows, bytes, [&](int64_t row) {
    const int64_t at = slot_offset(shape, slots[row]) * type_bytes(type);
    std::memcpy(static_cast<char*>(pool) + at, static_cast<const char*>(in) + row * bytes,
                static_cast<size_t>(bytes));
  });
}

}  // namespace aserve
