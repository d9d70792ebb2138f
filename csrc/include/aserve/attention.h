// Causal attention over paged KV, prefill and decode alike: a row sees the keys of its sequence up to
// its own position, whichever rows are beside it. Keys are taken in blocks of 64 aligned to position
// 0 with an online softmax, so a row's bits depend on nothing but its own sequence.
#pragma once

#include <cstdint>

#include "aserve/index.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

constexpr int64_t key_block = 64;

struct Attention {
  Type type;  // of k and v
  const void* k;
  const void* v;
  PageShape k_shape, v_shape;  // same but for the page stride
  int64_t heads;               // of q, a multiple of k_shape.heads
  float scale;
  const float* q;  // [rows, heads, dim], rows q_stride floats apart
  int64_t q_stride;
  float* out;  // [rows, heads, dim], contiguous
  int64_t sequences;
  const int32_t* row_start;   // [sequences + 1]
  const int32_t* positions;   // [rows], ascending within a sequence, below its kv_len
  const int32_t* kv_len;      // [sequences]: what its pages hold
  const int32_t* page_table;  // [sequences, pages_max]
  int64_t pages_max;
};

void attention(Team& team, const Attention& call);

}  // namespace aserve
