// The blocks of a decoder, each in one call: what stands between two collectives. They are the
// operations of the other headers in the order in which a model would call them, so the bits are the
// same; what a call needs on its way is kept in a workspace from one step to the next.
#pragma once

#include <cstdint>

#include "aserve/attention.h"
#include "aserve/index.h"
#include "aserve/linear.h"
#include "aserve/memory.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace aserve {

// Norm, joint projection, norms of q and k, rotation, KV write, attention, output projection.
struct AttentionBlock {
  const float* norm;    // [hidden]
  const float* q_norm;  // [dim], or null: neither q nor k is normed
  const float* k_norm;
  const Weight* qkv;  // [(heads + 2 kv_heads) dim, hidden]
  const Weight* out;  // [hidden, heads dim]
  int64_t heads, kv_heads, dim;
  float eps, scale;

  int64_t hidden() const { return qkv->k; }
};

// Norm, gate and up, gated activation, down.
struct MlpBlock {
  const float* norm;      // [hidden]
  const Weight* gate_up;  // [2 inner, hidden]
  const Weight* down;     // [hidden, inner]
  float eps;

  int64_t hidden() const { return gate_up->k; }
};

// What all layers share in one step.
struct BlockStep {
  int64_t rows;
  const int32_t* slots;  // [rows]
  const float* cos_sin;  // [positions, rot]
  int64_t rot;
  Attention attend;  // who sees what; not the pages, nor what comes in and goes out
};

struct KvPages {
  Type type;
  void* k;
  void* v;
  PageShape k_shape, v_shape;
};

// The rows that a block takes: x, or x + added, which it then leaves in total (it may be x).
struct Stream {
  const float* x;
  const float* added;  // null: there is nothing to add
  float* total;
};

// Memory by purpose, 64-byte aligned; grows when asked for more and is kept. One caller at a time.
class Workspace {
 public:
  enum Slot { normed, qkv, attended, added, total, entering, picked, of_drafts, slots_n };
  // A second request for a slot invalidates the first. Throws std::bad_alloc.
  float* take(Slot slot, int64_t floats);

 private:
  Memory at_[slots_n];
  int64_t bytes_[slots_n] = {};
};

// All row blocks of the last linear added up, or each alone: [row block][rows][hidden].
enum class Sums { whole, parts };

// out: [rows, heads dim], the block up to its output projection.
void attend_block(Team& team, Workspace& space, const AttentionBlock& block, const BlockStep& step,
                  const KvPages& pages, const Stream& stream, float* out);
void attention_block(Team& team, Workspace& space, const AttentionBlock& block,
                     const BlockStep& step, const KvPages& pages, const Stream& stream, Sums sums,
                     float* y);
void mlp_block(Team& team, Workspace& space, const MlpBlock& block, int64_t rows,
               const Stream& stream, Sums sums, float* y);

struct LayerBlocks {
  AttentionBlock attention;
  MlpBlock mlp;
};

// All layers of a stage of one rank, at least one. `norm` is that behind the last layer of the model;
// null: out is what the next stage takes.
struct Stack {
  const LayerBlocks* layers;
  int64_t n;
  const float* norm;
  float eps;
};

// Where the rows that enter a layer of a stack are left, for who wants them beside what comes out.
struct Capture {
  int64_t layer;
  float* rows;  // [rows, hidden]
};

// By ascending layers, each at most once.
struct Captures {
  const Capture* at;
  int64_t n;
};

// pages[i] belongs to layer i; x and out are [rows, hidden].
void run_stack(Team& team, Workspace& space, const Stack& stack, const BlockStep& step,
               const KvPages* pages, const Captures& captures, const float* x, float* out);

}  // namespace aserve
