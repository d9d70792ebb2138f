// Index arithmetic shared by processors: where a slot lives in a paged pool.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ASERVE_HD __host__ __device__ inline
#else
#define ASERVE_HD inline
#endif

namespace aserve {

// A layer's K (or V) pages: [pages, page_size, heads, dim], a page being contiguous. `dim` counts the
// elements that a head takes; of int8 the last four are the bytes of its scale.
struct PageShape {
  int64_t pages, page_size, heads, dim;
  int64_t page_stride;  // elements from a page to the next
};

ASERVE_HD int64_t slot_offset(const PageShape& shape, int64_t slot) {
  const int64_t page = slot / shape.page_size;
  return page * shape.page_stride + (slot - page * shape.page_size) * shape.heads * shape.dim;
}

// Where the token at a position of a sequence lives, whose page ids are given.
ASERVE_HD int64_t token_offset(const PageShape& shape, const int32_t* pages, int64_t position) {
  const int64_t page = position / shape.page_size;
  return pages[page] * shape.page_stride +
         (position - page * shape.page_size) * shape.heads * shape.dim;
}

ASERVE_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace aserve
