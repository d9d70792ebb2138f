// Moving rows in and out of a layer's pages. Slots are checked by the caller.
#pragma once

#include <cstdint>

#include "aserve/index.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// One token's heads, [heads, values] float32, into the row of a page that begins at `to`.
void kv_write(const float* x, Type type, const PageShape& shape, void* to);

// k and v are [rows, heads, values] float32, rows k_stride and v_stride floats apart.
struct KvAppend {
  Type type;
  const float *k, *v;
  int64_t k_stride, v_stride;
  void *k_pool, *v_pool;
  PageShape k_shape, v_shape;  // same but for the page stride
  const int32_t* slots;
  int64_t rows;
};

void kv_append(Team& team, const KvAppend& call);
// Of one pool.
void kv_append(Team& team, const float* x, int64_t x_stride, Type type, void* pool,
               const PageShape& shape, const int32_t* slots, int64_t rows);
// out is [rows, heads, dim] in the type of the pool.
void kv_gather(Team& team, Type type, const void* pool, const PageShape& shape,
               const int32_t* slots, int64_t rows, void* out);
void kv_scatter(Team& team, Type type, void* pool, const PageShape& shape, const int32_t* slots,
                int64_t rows, const void* in);

struct KvPool {
  Type type;
  void* pool;
  PageShape shape;
};

// In each of n pools, from one slot to another: a pool's sources are all read before it is written.
void kv_move(Team& team, const KvPool* pools, int64_t n, const int32_t* from, const int32_t* to,
             int64_t rows);

// Tokens [begin, end) of one sequence, `heads` of their heads, from one paged layout into another of
// the same type and dim.
struct KvCopy {
  Type type;
  const void* from;
  PageShape from_shape;
  const int32_t* from_pages;  // of the sequence, from its position 0
  int64_t from_head;
  void* to;
  PageShape to_shape;
  const int32_t* to_pages;
  int64_t to_head;
  int64_t heads, begin, end;
};

void kv_copy(Team& team, const KvCopy& call);

}  // namespace aserve
