// A draft head of one layer (EAGLE, EAGLE-3), and trees of drafts grown with it level by level: the
// operations of the other headers in the order in which they would be called, with the same bits.
#pragma once

#include <cstdint>

#include "aserve/block.h"

namespace aserve {

// The layer of a draft head (EAGLE, EAGLE-3) and the head behind it. With norms its attention takes
// embedding and hidden row side by side, each normed; without, hidden rows as they come.
struct DraftLayer {
  const float* norm_embedding;  // [hidden], or null: neither is normed
  const float* norm_hidden;
  AttentionBlock attention;  // whose norm is not used
  MlpBlock mlp;
  const float* norm;   // [hidden] before the head, or null
  const Weight* head;  // [draft vocabulary, hidden]
  float eps;
};

// Those of a step's rows that go on, and who sees what among them.
struct Ends {
  int64_t n;
  const int64_t* rows;
  Attention attend;
};

// embedded and hidden: [rows, hidden]. KV is written of all rows; out [n, hidden] and logits
// [n, draft vocabulary] are of `ends`, or of all rows where that is null.
void draft_layer(Team& team, Workspace& space, const DraftLayer& layer, const BlockStep& step,
                 const KvPages& pages, const float* embedded, const float* hidden, const Ends* ends,
                 float* out, float* logits);

// Rows by token id: packed, or numbers [rows, dim].
struct Embedding {
  const Weight* packed;  // null: table
  Type type;
  const void* table;
  int64_t rows, dim;
};

// At most `tokens` nodes of `depth` levels; of each level the `width` best go on, each with as many
// children.
struct DraftSize {
  int64_t depth, width, tokens;

  int64_t levels() const { return depth < tokens ? depth : tokens; }
  int64_t candidates() const { return width + (levels() - 1) * width * width; }
  int64_t nodes() const { return tokens < candidates() ? tokens : candidates(); }
  // That have KV of their own.
  int64_t placed() const { return (levels() - 1) * width; }
};

// n sequences that trees are to grow below. Their pages have the KV of all their pairs; that of nodes
// goes to pages_each pages from first_page + i * pages_each on, behind a copy of what is in the last
// page of sequence i.
struct DraftRoots {
  int64_t n;
  const float* hidden;        // [n, hidden], of their last pairs, as the next
  const float* logits;        // [n, draft vocabulary]
  const int32_t* page_table;  // [n, pages_max], one page behind the last used included
  int64_t pages_max;
  const int32_t* lengths;  // [n] pairs
  int64_t first_page, pages_each;
  const int32_t* ids;  // [draft vocabulary] of the target, or null: the same
  const float* cos_sin;
  int64_t rot;
  // The target's noise, by `most` of the likeliest; null: there is none.
  const uint64_t* seeds;  // [n], as the next two
  const int32_t* positions;
  const float* temperatures;
  int64_t most;
};

// fc: of an embedding and a hidden row side by side, for heads without norms of them; else null.
// tokens and parents: [n, size.nodes()], parents among a tree's own, -1 the root.
void grow_drafts(Team& team, Workspace& space, const DraftLayer& layer, const Weight* fc,
                 const Embedding& table, const KvPages& pages, const DraftRoots& roots,
                 const DraftSize& size, int32_t* tokens, int32_t* parents);

}  // namespace aserve
