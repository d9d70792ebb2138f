#include "aserve/block.h"

#include <algorithm>

#include "aserve/kv.h"
#include "aserve/rows.h"
#include "block_parts.h"
#include "share.h"

namespace aserve {

float* Workspace::take(Slot slot, int64_t floats) {
  int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
  if (bytes_[slot] < bytes) {
    bytes_[slot] = 0;
    at_[slot].reset();
    at_[slot] = take_memory(&bytes);
    bytes_[slot] = bytes;
  }
  return static_cast<float*>(at_[slot].get());
}

namespace {

// Normed rows; the stream moves on to x + added, where that was asked for.
const float* norm_rows(Team& team, Workspace& space, const float* weight, float eps, int64_t rows,
                       int64_t hidden, const Stream& stream) {
  float* y = space.take(Workspace::normed, rows * hidden);
  const bool adds = stream.added != nullptr;
  rms_norm(team, {adds ? stream.added : stream.x, hidden, adds ? stream.x : nullptr, stream.total,
                  weight, y, rows, 1, hidden, eps});
  return y;
}

constexpr int64_t rows_ahead = 8;  // whose places are asked for before they are written

// Asks for where k and v of some rows will be written. The whole model has been read since a step was
// last here, and stores that miss wait for each other.
void fetch_places(const BlockStep& step, const KvPages& pages, int64_t begin, int64_t end) {
  const int64_t item = type_bytes(pages.type);
  for (int64_t row = begin; row < std::min(end, step.rows); ++row) {
    const auto fetch = [&](void* pool, const PageShape& shape) {
      const char* at = static_cast<char*>(pool) + slot_offset(shape, step.slots[row]) * item;
      const int64_t bytes = shape.heads * shape.dim * item;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1);
    };
    fetch(pages.k, pages.k_shape);
    fetch(pages.v, pages.v_shape);
  }
}

// Norms q and k, rotates them and writes k and v, row by row: a row is still in the first cache.
void place_rows(Team& team, const AttentionBlock& b, const BlockStep& step, const KvPages& pages,
                float* qkv) {
  const int64_t q_len = b.heads * b.dim, kv_len = b.kv_heads * b.dim, stride = q_len + 2 * kv_len;
  const auto norm_heads = [&](float* x, const float* weight, int64_t heads) {
    rms_norm(team, {x, stride, nullptr, nullptr, weight, x, 1, heads, b.dim, b.eps});
  };
  share_rows(team, step.rows, stride, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      fetch_places(step, pages, row + rows_ahead, std::min(end, row + rows_ahead + 1));
      float* q = qkv + row * stride;
      float* k = q + q_len;
      if (b.q_norm != nullptr) {
        norm_heads(q, b.q_norm, b.heads);
        norm_heads(k, b.k_norm, b.kv_heads);
      }
      rope(team, {q, k, stride, stride, b.heads, b.kv_heads, 1, b.dim, step.rot,
                  step.attend.positions + row, step.cos_sin});
      const int32_t* slot = step.slots + row;
      kv_append(team, k, stride, pages.type, pages.k, pages.k_shape, slot, 1);
      kv_append(team, k + kv_len, stride, pages.type, pages.v, pages.v_shape, slot, 1);
    }
  });
}

void copy_rows(Team& team, const float* x, int64_t rows, int64_t hidden, float* y) {
  share_rows(team, rows, hidden, [&](int64_t begin, int64_t end) {
    std::copy(x + begin * hidden, x + end * hidden, y + begin * hidden);
  });
}

}  // namespace

Attention attention_call(const AttentionBlock& b, const BlockStep& step, const KvPages& pages,
                         const float* qkv, float* out) {
  Attention call = step.attend;
  call.type = pages.type;
  call.k = pages.k;
  call.v = pages.v;
  call.k_shape = pages.k_shape;
  call.v_shape = pages.v_shape;
  call.heads = b.heads;
  call.scale = b.scale;
  call.q = qkv;
  call.q_stride = (b.heads + 2 * b.kv_heads) * b.dim;
  call.out = out;
  return call;
}

float* project_rows(Team& team, Workspace& space, const AttentionBlock& b, const BlockStep& step,
                    const KvPages& pages, const float* normed) {
  float* qkv = space.take(Workspace::qkv, step.rows * b.qkv->n);
  fetch_places(step, pages, 0, rows_ahead);
  linear(team, *b.qkv, normed, step.rows, qkv);
  place_rows(team, b, step, pages, qkv);
  return qkv;
}

void attend_block(Team& team, Workspace& space, const AttentionBlock& b, const BlockStep& step,
                  const KvPages& pages, const Stream& stream, float* out) {
  const Team::Busy busy(team);
  const float* normed = norm_rows(team, space, b.norm, b.eps, step.rows, b.hidden(), stream);
  const float* qkv = project_rows(team, space, b, step, pages, normed);
  attention(team, attention_call(b, step, pages, qkv, out));
}

void attention_block(Team& team, Workspace& space, const AttentionBlock& b, const BlockStep& step,
                     const KvPages& pages, const Stream& stream, Sums sums, float* y) {
  const Team::Busy busy(team);
  float* out = space.take(Workspace::attended, step.rows * b.out->k);
  attend_block(team, space, b, step, pages, stream, out);
  linear(team, *b.out, out, step.rows, y, sums == Sums::whole ? 0 : step.rows * b.out->n);
}

void mlp_block(Team& team, Workspace& space, const MlpBlock& b, int64_t rows, const Stream& stream,
               Sums sums, float* y) {
  const Team::Busy busy(team);
  const float* normed = norm_rows(team, space, b.norm, b.eps, rows, b.hidden(), stream);
  gated(team, *b.gate_up, *b.down, normed, rows, y, sums == Sums::whole ? 0 : rows * b.down->n);
}

void run_stack(Team& team, Workspace& space, const Stack& stack, const BlockStep& step,
               const KvPages* pages, const Captures& captures, const float* x, float* out) {
  const Team::Busy busy(team);
  const int64_t rows = step.rows, hidden = stack.layers[0].attention.hidden();
  float* added = space.take(Workspace::added, rows * hidden);
  float* total = space.take(Workspace::total, rows * hidden);
  const Capture *next = captures.at, *end = next + captures.n;
  Stream stream{x, nullptr, total};
  for (int64_t i = 0; i < stack.n; ++i) {
    const LayerBlocks& layer = stack.layers[i];
    // The sum that enters a layer is made by its first norm: it is left where it is wanted, and the
    // stream goes on from there.
    float* entering = next != end && next->layer == i ? (next++)->rows : nullptr;
    if (entering != nullptr && i == 0) copy_rows(team, x, rows, hidden, entering);
    stream.total = entering != nullptr ? entering : total;
    attention_block(team, space, layer.attention, step, pages[i], stream, Sums::whole, added);
    if (i > 0) stream.x = stream.total;
    stream = {stream.x, added, total};
    mlp_block(team, space, layer.mlp, rows, stream, Sums::whole, added);
    stream.x = total;
  }
  if (stack.norm == nullptr) {
    add(team, stream.x, added, out, rows * hidden);
    return;
  }
  rms_norm(team,
           {added, hidden, stream.x, total, stack.norm, out, rows, 1, hidden, stack.eps});
}

}  // namespace aserve
