// Causal attention over paged KV, prefill and decode alike: a row sees the keys of its sequence up to
// its own position, whichever rows are beside it. Keys are taken in segments of 256 aligned to
// position 0, each with a softmax of its own; segments are folded together in ascending order by one
// formula. So a row's bits depend on nothing but its own sequence, and long contexts can be shared
// out over threads.
#pragma once

#include <cstdint>

#include "aserve/index.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

constexpr int64_t key_segment = 256;

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
  const int32_t* positions;   // [rows], below kv_len, ascending within a sequence that is no tree
  const int32_t* kv_len;      // [sequences]: what its pages hold
  const int32_t* page_table;  // [sequences, pages_max]
  int64_t pages_max;

  // What follows may be left zero.
  int64_t window;      // a row sees the last so many keys up to its own; 0: all
  const float* sinks;  // [heads]: one more logit, without a value, in the softmax of each head
  // A row of a tree sees, after the keys before the tree, those of its path down from a root. The
  // path of row t is paths[path_start[t], path_start[t + 1]): places counted from the tree's first,
  // which is positions[t] + 1 - the path's length; the last of them is the row's own. A row without
  // a path sees keys by position; a sequence has rows of one kind.
  const int32_t* path_start;  // [rows + 1]
  const int32_t* paths;
  int64_t paths_len;

  int64_t dim() const { return values_of(type, k_shape.dim); }
};

void attention(Team& team, const Attention& call);

}  // namespace aserve
