#include "aserve/kv.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

// Tokens left in the page of a position, and no more than there are before `end`.
int64_t run_len(const PageShape& shape, int64_t position, int64_t end) {
  return std::min(shape.page_size - position % shape.page_size, end - position);
}

void copy_tokens(const KvCopy& c, int64_t begin, int64_t end) {
  const int64_t item = type_bytes(c.type), dim = c.from_shape.dim;
  const int64_t from_row = c.from_shape.heads * dim * item, to_row = c.to_shape.heads * dim * item;
  const int64_t bytes = c.heads * dim * item;
  const bool whole_rows = from_row == bytes && to_row == bytes;
  for (int64_t at = begin, n; at < end; at += n) {
    n = std::min(run_len(c.from_shape, at, end), run_len(c.to_shape, at, end));
    const char* from = static_cast<const char*>(c.from) +
                       (token_offset(c.from_shape, c.from_pages, at) + c.from_head * dim) * item;
    char* to = static_cast<char*>(c.to) +
               (token_offset(c.to_shape, c.to_pages, at) + c.to_head * dim) * item;
    if (whole_rows) {
      std::memcpy(to, from, static_cast<size_t>(n * bytes));
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(to + i * to_row, from + i * from_row, static_cast<size_t>(bytes));
    }
  }
}

void move_slots(const KvPool& p, const int32_t* from, const int32_t* to, int64_t rows,
                std::vector<char>& held) {
  const int64_t item = type_bytes(p.type);
  const size_t bytes = static_cast<size_t>(p.shape.heads * p.shape.dim * item);
  if (held.size() < static_cast<size_t>(rows) * bytes) held.resize(static_cast<size_t>(rows) * bytes);
  char *pool = static_cast<char*>(p.pool), *row = held.data();
  for (int64_t i = 0; i < rows; ++i, row += bytes) {
    std::memcpy(row, pool + slot_offset(p.shape, from[i]) * item, bytes);
  }
  row = held.data();
  for (int64_t i = 0; i < rows; ++i, row += bytes) {
    std::memcpy(pool + slot_offset(p.shape, to[i]) * item, row, bytes);
  }
}

}  // namespace

void kv_write(const float* x, Type type, const PageShape& shape, void* to) {
  const Kernels& k = kernels();
  const int64_t n = values_of(type, shape.dim);
  if (type == Type::bf16) {
    k.narrow(x, shape.heads * n, static_cast<uint16_t*>(to));
  } else if (type == Type::f32) {
    std::memcpy(to, x, static_cast<size_t>(shape.heads * n) * sizeof(float));
  } else {
    int8_t* heads = static_cast<int8_t*>(to);
    for (int64_t head = 0; head < shape.heads; ++head) {
      k.quantise(x + head * n, n, heads + head * shape.dim);
    }
  }
}

void kv_append(Team& team, const KvAppend& call) {
  const int64_t item = type_bytes(call.type);
  share_slots(team, call.rows, call.k_shape.heads * call.k_shape.dim * 8, [&](int64_t row) {
    const int64_t k_at = slot_offset(call.k_shape, call.slots[row]) * item;
    const int64_t v_at = slot_offset(call.v_shape, call.slots[row]) * item;
    kv_write(call.k + row * call.k_stride, call.type, call.k_shape,
             static_cast<char*>(call.k_pool) + k_at);
    kv_write(call.v + row * call.v_stride, call.type, call.v_shape,
             static_cast<char*>(call.v_pool) + v_at);
  });
}

void kv_append(Team& team, const float* x, int64_t x_stride, Type type, void* pool,
               const PageShape& shape, const int32_t* slots, int64_t rows) {
  share_slots(team, rows, shape.heads * shape.dim * 4, [&](int64_t row) {
    const int64_t at = slot_offset(shape, slots[row]) * type_bytes(type);
    kv_write(x + row * x_stride, type, shape, static_cast<char*>(pool) + at);
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

void kv_move(Team& team, const KvPool* pools, int64_t n, const int32_t* from, const int32_t* to,
             int64_t rows) {
  if (n == 0 || rows == 0) return;
  const PageShape& first = pools[0].shape;
  const int64_t pool_bytes = rows * first.heads * first.dim * type_bytes(pools[0].type);
  const int64_t step = std::max<int64_t>(1, bytes_task / pool_bytes);
  team.run(ceil_div(n, step), [&](int64_t task) {
    static thread_local std::vector<char> held;
    for (int64_t i = task * step; i < std::min(n, (task + 1) * step); ++i) {
      move_slots(pools[i], from, to, rows, held);
    }
  });
}

void kv_copy(Team& team, const KvCopy& call) {
  const int64_t bytes = std::max<int64_t>(1, call.heads * call.from_shape.dim * type_bytes(call.type));
  const int64_t step = std::max<int64_t>(1, bytes_task / bytes);
  team.run(ceil_div(call.end - call.begin, step), [&](int64_t i) {
    const int64_t begin = call.begin + i * step;
    copy_tokens(call, begin, std::min(call.end, begin + step));
  });
}

}  // namespace aserve
