// The kernel of csrc/cuda/attention.cu: one tile of lanes over the keys it sees.
#pragma once

#include "aserve/cuda.cuh"
#include "aserve/flash.cuh"
#include "aserve/flash_tile.cuh"
#include "aserve/number.h"
#include "aserve/thread_block.cuh"

namespace aserve {

// Dim is the head's, rounded up; Wide is false for int8 keys; Split: a block takes one split.
template <int Dim, bool Wide, int Warps, bool Split>
struct Flash {
  static constexpr int threads = Warps * 32;
  static constexpr int keys = Dim > 64 ? 32 : 64, pieces = Dim / 8;
  static constexpr int tile_bytes = keys * Dim * 2;
  // Wide: two stages of K and V. Else two stages of K and V as bytes, and one of both widened.
  static constexpr int shared_tiles = 4 * tile_bytes;
  static constexpr int shared_totals = shared_tiles + 2 * keys * (2 * 8 + 2 * 4);
  // Sums of the splits so far are touched once a split: not worth registers.
  static constexpr int shared_bytes = shared_totals + (Split ? 0 : threads * pieces * 4 * 4);

  static_assert(shared_bytes <= 99 * 1024, "what a block may have on 8.6 and 8.9");

  aserve_pages pages;
  aserve_attend call;

  template <class B>
  struct State {
    typename B::template Local<Halves<Dim / 16>> q;
    typename B::template Local<Sums<keys / 8>> scores;
    typename B::template Local<Halves<keys / 16>> weights;
    typename B::template Local<Sums<pieces>> part;
    typename B::template Local<Softs> soft, soft_total;
    typename B::template Local<Two> pair;
    typename B::template Local<RowPair> rows;
    typename B::template Local<Halves<1>> loaded;
    ASERVE_DEVICE explicit State(B& block)
        : q(block), scores(block), weights(block), part(block), soft(block), soft_total(block), pair(block), rows(block), loaded(block) {}
  };

  // Shared memory, by stage.
  template <class B>
  ASERVE_DEVICE char* raw(B& block, int stage, bool is_v) const {
    return block.shared + (stage * 2 + is_v) * (Wide ? tile_bytes : tile_bytes / 2);
  }
  template <class B>
  ASERVE_DEVICE char* tile_of(B& block, int stage, bool is_v) const {
    return Wide ? raw(block, stage, is_v) : block.shared + 2 * tile_bytes + is_v * tile_bytes;
  }
  template <class B>
  ASERVE_DEVICE int64_t* offsets(B& block, int stage) const {  // of K, then of V
    return reinterpret_cast<int64_t*>(block.shared + shared_tiles) + stage * 2 * keys;
  }
  template <class B>
  ASERVE_DEVICE float* key_scales(B& block, int stage) const {  // of K, then of V
    char* at = block.shared + shared_tiles + 2 * 2 * keys * 8;
    return reinterpret_cast<float*>(at) + stage * 2 * keys;
  }

  // The `i`-th of a thread's sums over splits; only that thread's.
  template <class B>
  ASERVE_DEVICE float& total_of(B& block, int t, int i) const {
    return reinterpret_cast<float*>(block.shared + shared_totals)[i * threads + t];
  }

  // Begins to bring a block of keys and values to a stage; zeros for keys that nobody sees, since
  // their pages may be somebody else's.
  template <class B>
  ASERVE_DEVICE void fetch(B& block, const FlashTile& tile, int64_t key_begin, int stage) const {
    int64_t* at = offsets(block, stage);
    float* scales = key_scales(block, stage);
    block.each([&](int t) {
      const int32_t* table = call.page_table + tile.n * call.pages_max;
      const int64_t len = pages.head_len;
      const PageShape k = {pages.pages, pages.page_size, pages.heads, len, pages.k_stride};
      const PageShape v = {pages.pages, pages.page_size, pages.heads, len, pages.v_stride};
      for (int i = t; i < keys; i += threads) {
        const int64_t key = key_begin + i;
        const bool is_there = key >= tile.range.begin && key < tile.range.end;
        at[i] = is_there ? token_offset(k, table, key) + tile.kv_head * len : -1;
        at[keys + i] = is_there ? token_offset(v, table, key) + tile.kv_head * len : -1;
        if (!Wide) {
          scales[i] = is_there ? scale_at(pages.k, at[i]) : 0.0f;
          scales[keys + i] = is_there ? scale_at(pages.v, at[keys + i]) : 0.0f;
        }
      }
    });
    // A head of int8 with its scale starts at a multiple of 4 bytes only.
    constexpr int item = Wide ? 2 : 1, unit = Wide ? 16 : 4, row_pieces = Dim * item / unit;
    block.each_alone([&](int t) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const char* pool = static_cast<const char*>(which == 0 ? pages.k : pages.v);
        char* to = raw(block, stage, which == 1);
#pragma unroll
        for (int i = t; i < keys * row_pieces; i += threads) {
          const int row = i / row_pieces, piece = i % row_pieces;
          const int64_t from = at[which * keys + row];
          const bool is_there = from >= 0 && piece * unit < pages.dim * item;
          const int place = Wide ? swizzled(row, piece, row_pieces) : i;
          block.template copy<unit>(to + place * unit,
                                    is_there ? pool + from * item + piece * unit : pool, is_there);
        }
      }
    });
  }

  ASERVE_DEVICE float scale_at(const void* pool, int64_t head) const {
    return *reinterpret_cast<const float*>(static_cast<const char*>(pool) + head + pages.dim);
  }

  // int8 as bfloat16, which holds every one of them.
  template <class B>
  ASERVE_DEVICE void widen_tiles(B& block, int stage) const {
    block.each([&](int t) {
      for (int i = t; i < 2 * keys * pieces; i += threads) {
        const bool is_v = i >= keys * pieces;
        const int at = is_v ? i - keys * pieces : i, row = at / pieces, piece = at % pieces;
        const int8_t* from = reinterpret_cast<const int8_t*>(raw(block, stage, is_v)) + at * 8;
        uint32_t* to = reinterpret_cast<uint32_t*>(tile_of(block, stage, is_v)) +
                       swizzled(row, piece, pieces) * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = B::pair_of(from[2 * j], from[2 * j + 1]);
      }
    });
  }

  template <class B>
  ASERVE_DEVICE void open_rows(B& block, const FlashTile& tile, State<B>& state) const {
    block.each_alone([&](int t) {
      const int first = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t lane = first + half * 8;
        const bool is_there = lane < tile.lanes;
        state.rows[t].row[half] = is_there ? tile.row_of(lane) : -1;
        const float* q = call.q;
        if (is_there) {
          q += (tile.row_begin + tile.row_of(lane)) * call.q_stride + tile.head_of(lane) * pages.dim;
        }
#pragma unroll
        for (int i = 0; i < Dim / 16 * 2; ++i) {  // half pieces of 8
          const int d = i * 8 + pair;
          const bool inside = is_there && d < pages.dim;
          state.q[t].v[i / 2][i % 2 * 2 + half] =
              B::pair_of(inside ? q[d] : 0.0f, inside ? q[d + 1] : 0.0f);
        }
        state.soft_total[t].v[half] = {-INFINITY, 0.0f};
      }
      for (int i = 0; i < pieces * 4 && !Split; ++i) total_of(block, t, i) = 0.0f;
    });
  }

  template <class B>
  ASERVE_DEVICE void open_split(B& block, State<B>& state) const {
    block.each_alone([&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) state.soft[t].v[half] = {-INFINITY, 0.0f};
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.part[t].v[i][j] = 0.0f;
      }
    });
  }

  template <class B>
  ASERVE_DEVICE void score(B& block, State<B>& state, int stage) const {
    const char* k = tile_of(block, stage, false);
    block.each_alone([&](int t) {
#pragma unroll
      for (int i = 0; i < keys / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.scores[t].v[i][j] = 0.0f;
      }
    });
#pragma unroll
    for (int d = 0; d < Dim / 16; ++d) {
#pragma unroll
      for (int n = 0; n < keys / 16; ++n) {
        block.template load_matrices<false>(
            [&](int t) { return state.loaded[t].v[0]; },
            [&](int t) {
              const int lane = t % 32, matrix = lane / 8;
              const int row = n * 16 + matrix / 2 * 8 + lane % 8;
              return k + swizzled(row, d * 2 + matrix % 2, pieces) * 16;
            });
        block.mma([&](int t) { return state.scores[t].v[2 * n]; },
                  [&](int t) { return state.q[t].v[d]; },
                  [&](int t) { return state.loaded[t].v[0]; });
        block.mma([&](int t) { return state.scores[t].v[2 * n + 1]; },
                  [&](int t) { return state.q[t].v[d]; },
                  [&](int t) { return state.loaded[t].v[0] + 2; });
      }
    }
  }

  // From scores to weights, and the running maximum and sum.
  template <class B>
  ASERVE_DEVICE void soften_scores(B& block, const FlashTile& tile, State<B>& state,
                                   int64_t key_begin, int stage) const {
    const float factor = call.scale * 1.44269504f;
    const float* scales = key_scales(block, stage);
    const bool masks = key_begin < tile.range.begin_all || key_begin + keys > tile.range.end_all;
    block.each_alone([&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = state.rows[t].row[half];
        float most = state.soft[t].v[half].max;
#pragma unroll
        for (int i = 0; i < keys / 8; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int column = i * 8 + t % 4 * 2 + j;
            float& s = state.scores[t].v[i][half * 2 + j];
            s *= Wide ? factor : factor * scales[column];
            if (row < 0 || (masks && !is_visible(tile.sequence, row, key_begin + column))) {
              s = -INFINITY;
            }
            most = s > most ? s : most;
          }
        }
        state.pair[t].v[half] = most;
      }
    });
    block.reduce_quads(state.pair, Larger());
    block.each_alone([&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Soft& soft = state.soft[t].v[half];
        const float max = state.pair[t].v[half], base = finite(max);
        const float back = exp2f(soft.max - base);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < keys / 8; ++i) {
          float w[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            w[j] = exp2f(state.scores[t].v[i][half * 2 + j] - base);
            sum += w[j];
            if (!Wide) w[j] *= scales[keys + i * 8 + t % 4 * 2 + j];
          }
          state.weights[t].v[i / 2][i % 2 * 2 + half] = B::pair_of(w[0], w[1]);
        }
        soft.sum = fmaf(soft.sum, back, sum);
        soft.max = max;
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
          state.part[t].v[i][half * 2] *= back;
          state.part[t].v[i][half * 2 + 1] *= back;
        }
      }
    });
  }

  template <class B>
  ASERVE_DEVICE void weigh(B& block, State<B>& state, int stage) const {
    const char* v = tile_of(block, stage, true);
#pragma unroll
    for (int k = 0; k < keys / 16; ++k) {
#pragma unroll
      for (int d = 0; d < Dim / 16; ++d) {
        block.template load_matrices<true>(
            [&](int t) { return state.loaded[t].v[0]; },
            [&](int t) {
              const int lane = t % 32, matrix = lane / 8;
              const int row = k * 16 + matrix % 2 * 8 + lane % 8;
              return v + swizzled(row, d * 2 + matrix / 2, pieces) * 16;
            });
        block.mma([&](int t) { return state.part[t].v[2 * d]; },
                  [&](int t) { return state.weights[t].v[k]; },
                  [&](int t) { return state.loaded[t].v[0]; });
        block.mma([&](int t) { return state.part[t].v[2 * d + 1]; },
                  [&](int t) { return state.weights[t].v[k]; },
                  [&](int t) { return state.loaded[t].v[0] + 2; });
      }
    }
  }

  // The four threads of a row have each summed their own columns.
  template <class B>
  ASERVE_DEVICE void close_split(B& block, const FlashTile& tile, State<B>& state,
                                 int64_t split) const {
    block.each_alone([&](int t) {
      for (int half = 0; half < 2; ++half) state.pair[t].v[half] = state.soft[t].v[half].sum;
    });
    block.reduce_quads(state.pair, Add());
    block.each_alone([&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Soft part = {state.soft[t].v[half].max, state.pair[t].v[half]};
        if (Split) {
          put_partial(tile, state, t, half, part, split);
          continue;
        }
        const SoftScales scales = soften(state.soft_total[t].v[half], part);
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
#pragma unroll
          for (int j = half * 2; j < half * 2 + 2; ++j) {
            float& total = total_of(block, t, i * 4 + j);
            total = add_scaled(total, state.part[t].v[i][j], scales);
          }
        }
      }
    });
  }

  template <class S>
  ASERVE_DEVICE void put_partial(const FlashTile& tile, S& state, int t, int half,
                                 const Soft& part, int64_t split) const {
    const int32_t lane = t / 32 * 16 + t % 32 / 4 + half * 8;
    if (lane >= tile.lanes) return;
    float* to = partial_at(call, pages.dim, tile.row_begin + tile.row_of(lane), tile.head_of(lane),
                           split);
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int d = i * 8 + t % 4 * 2 + j;
        if (d < pages.dim) to[d] = state.part[t].v[i][half * 2 + j];
      }
    }
    if (t % 4 == 0) to[pages.dim] = part.max, to[pages.dim + 1] = part.sum;
  }

  template <class B>
  ASERVE_DEVICE void close_rows(B& block, const FlashTile& tile, State<B>& state) const {
    block.each_alone([&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t lane = t / 32 * 16 + t % 32 / 4 + half * 8;
        if (lane >= tile.lanes) continue;
        const int64_t head = tile.head_of(lane);
        const float factor = soft_factor(state.soft_total[t].v[half],
                                         call.sinks == nullptr ? nullptr : call.sinks + head);
        float* out =
            call.out + ((tile.row_begin + tile.row_of(lane)) * call.heads + head) * pages.dim;
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int d = i * 8 + t % 4 * 2 + j;
            if (d < pages.dim) out[d] = total_of(block, t, i * 4 + half * 2 + j) * factor;
          }
        }
      }
    });
  }

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    FlashTile tile;
    if (!find_tile(pages, call, block.x(), block.y(), Warps * 16, tile)) return;
    int64_t begin = tile.range.begin / keys, end = ceil_div(tile.range.end, keys);
    constexpr int64_t per_split = flash_split / keys;
    if (Split) {
      const int64_t first = block.z() * per_split, last = first + per_split;
      begin = begin > first ? begin : first;
      end = end < last ? end : last;
    }
    if (begin >= end) return;
    State<B> state(block);
    open_rows(block, tile, state);
    open_split(block, state);
    fetch(block, tile, begin * keys, static_cast<int>(begin & 1));
    block.commit();
    for (int64_t at = begin; at < end; ++at) {
      const int stage = static_cast<int>(at & 1);
      if (at + 1 < end) fetch(block, tile, (at + 1) * keys, stage ^ 1);
      block.commit();
      block.template wait<1>();
      if (!Wide) widen_tiles(block, stage);
      score(block, state, stage);
      soften_scores(block, tile, state, at * keys, stage);
      weigh(block, state, stage);
      block.sync();  // the stage is read before it is fetched to again
      if (at + 1 == end || (at + 1) % per_split == 0) {
        close_split(block, tile, state, at / per_split);
        if (at + 1 < end) open_split(block, state);
      }
    }
    if (!Split) close_rows(block, tile, state);
  }
};

}  // namespace aserve
