// Moving rows in and out of a layer's pages. Slots are checked by the caller.
#pragma once

#include <cstdint>

#include "aserve/index.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// x is [rows, heads, dim] float32, rows x_stride floats apart.
void kv_append(Team& team, const float* x, int64_t x_stride, Type type, void* pool,
               const PageShape& shape, const int32_t* slots, int64_t rows);
// out is [rows, heads, dim] in the type of the pool.
void kv_gather(Team& team, Type type, const void* pool, const PageShape& shape,
               const int32_t* slots, int64_t rows, void* out);
void kv_scatter(Team& team, Type type, void* pool, const PageShape& shape, const int32_t* slots,
                int64_t rows, const void* in);

}  // namespace aserve
