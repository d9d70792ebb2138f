// Trees of drafts: their levels, the nodes chosen of them, the layout of their rows, what the model's
// draws keep, and which KV moves for it. A block for each tree: trees have tens of rows.
#include <climits>
#include <cmath>

#include "aserve/cuda.cuh"
#include "aserve/thread_block.cuh"
#include "aserve/tree.h"

namespace aserve {

constexpr int64_t candidates_max = 8192, noisy_max = 4096;

struct UnderNoise {
  static constexpr int threads = 128;
  aserve_noise call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t row = block.x(), first = row * call.m;
    const float temperature = call.temperatures[row];
    const bool noisy = temperature >= temperature_min;
    const uint64_t key = draw_key(call.seeds[row], static_cast<uint64_t>(call.positions[row]));
    double* scores = reinterpret_cast<double*>(block.shared);
    typename B::template Local<double> part(block);
    block.each([&](int t) {
      part[t] = -INFINITY;
      for (int i = t; i < call.m; i += threads) {
        const float logprob = call.logprobs[first + i];
        // Without noise the order is that in which they came.
        scores[i] = noisy ? noisy_score(logprob, temperature, key, call.tokens[first + i]) : -i;
        if (scores[i] > part[t]) part[t] = scores[i];
      }
    });
    const double most = block.reduce(part, Larger());
    block.each_alone([&](int t) {
      part[t] = 0;
      for (int i = t; i < call.m; i += threads) part[t] += exp(scores[i] - most);
    });
    const double whole = most + log(block.reduce(part, Add()));
    block.each_alone([&](int t) {
      for (int i = t; i < call.m; i += threads) {
        int64_t better = 0;
        for (int j = 0; j < call.m; ++j) better += is_likelier(scores[j], j, scores[i], i);
        if (better >= call.k) continue;
        const int64_t to = row * call.k + better;
        call.out_tokens[to] = call.tokens[first + i];
        call.out_logprobs[to] =
            noisy ? static_cast<float>(scores[i] - whole) : call.logprobs[first + i];
      }
    });
  }
};

struct Expand {
  static constexpr int threads = 128;
  aserve_tree_pool pool;
  aserve_expand call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t tree = block.x(), row = tree * pool.capacity;
    const int children = static_cast<int>(call.beams * call.k), k = static_cast<int>(call.k);
    float* scores = pool.scores + row + call.begin;
    int32_t* tokens = pool.tokens + row + call.begin;
    block.each([&](int t) {
      for (int i = t; i < children; i += threads) {
        const int32_t parent = call.beam == nullptr ? -1 : call.beam[tree * call.beams + i / k];
        const float before = parent < 0 ? 0.0f : pool.scores[row + parent];
        scores[i] = before + call.logprobs[tree * children + i];
        tokens[i] = call.top_tokens[tree * children + i];
        pool.parents[row + call.begin + i] = parent;
      }
    });
    block.each_alone([&](int t) {
      for (int i = t; i < children; i += threads) {
        const int32_t key = score_key(scores[i]);
        int64_t better = 0;
        for (int j = 0; j < children; ++j) better += is_better(score_key(scores[j]), j, key, i);
        if (better >= call.width) continue;
        const int64_t to = tree * call.width + better;
        call.places[to] = static_cast<int32_t>(call.begin + i);
        call.tokens[to] = tokens[i];
        call.rows[to] = static_cast<int32_t>(tree * call.beams + i / k);
      }
    });
  }
};

struct Or {
  ASERVE_HD uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

struct Select {
  static constexpr int threads = 128;
  aserve_tree_pool pool;
  aserve_select call;

  // Keys of all candidates, then a bit for each that is above the last chosen key, and for each equal.
  static int64_t shared_bytes(int64_t count) { return count * 4 + 2 * ceil_div(count, 32) * 4; }

  template <class B>
  ASERVE_DEVICE int64_t reaching(B& block, const int32_t* keys, int32_t least) const {
    typename B::template Local<int32_t> found(block);
    block.each_alone([&](int t) {
      found[t] = 0;
      for (int i = t; i < call.count; i += threads) found[t] += keys[i] >= least;
    });
    return block.reduce(found, Add());
  }

  // A key that `wanted` of the keys reach, or few more.
  template <class B>
  ASERVE_DEVICE int32_t least_key(B& block, const int32_t* keys, int64_t wanted) const {
    typename B::template Local<int32_t> low(block), high(block);
    block.each_alone([&](int t) {
      low[t] = INT_MAX;
      high[t] = INT_MIN;
      for (int i = t; i < call.count; i += threads) {
        low[t] = Smaller()(low[t], keys[i]);
        high[t] = Larger()(high[t], keys[i]);
      }
    });
    const int32_t least = block.reduce(low, Smaller()), most = block.reduce(high, Larger());
    KeySearch search = {least, most, wanted, call.count};
    while (!search.is_over()) {
      const int32_t key = search.key();
      search.tell(key, reaching(block, keys, key));
    }
    return search.low;
  }

  template <class B>
  ASERVE_DEVICE void mark(B& block, const int32_t* keys, int32_t least, uint32_t* above,
                          uint32_t* equal) const {
    typename B::template Local<uint32_t> more(block), same(block);
    for (int first = 0; first < call.count; first += threads) {
      block.each_alone([&](int t) {
        const bool there = first + t < call.count;
        more[t] = there && keys[first + t] > least ? 1u << t % 32 : 0;
        same[t] = there && keys[first + t] == least ? 1u << t % 32 : 0;
      });
      block.reduce_warps(more, Or());
      block.reduce_warps(same, Or());
      block.each_alone([&](int t) {
        if (t % 32 != 0 || first + t >= call.count) return;
        above[(first + t) / 32] = more[t];
        equal[(first + t) / 32] = same[t];
      });
    }
    block.sync();
  }

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t row = block.x() * pool.capacity, to = call.start[block.x()];
    const int64_t wanted = call.start[block.x() + 1] - to;
    const float* scores = pool.scores + row;
    const int32_t* parents = pool.parents + row;
    int32_t* keys = reinterpret_cast<int32_t*>(block.shared);
    uint32_t* above = reinterpret_cast<uint32_t*>(keys + call.count);
    uint32_t* equal = above + ceil_div(call.count, 32);
    if (wanted == 0) return;
    block.each([&](int t) {
      for (int i = t; i < call.count; i += threads) {
        int32_t key = score_key(scores[i]);
        for (int32_t at = row_above(parents, i); at >= 0; at = row_above(parents, at)) {
          key = Smaller()(key, score_key(scores[at]));
        }
        keys[i] = key;
      }
    });
    const int32_t least = wanted < call.count ? least_key(block, keys, wanted) : key_of_nan;
    // Of 32 bits, since no float's key is the greatest integer.
    const int64_t spare = wanted - reaching(block, keys, least + 1);
    mark(block, keys, least, above, equal);
    block.each_alone([&](int t) {
      const Marks better = {above}, even = {equal};
      const auto number = [&](int64_t place) {
        const int64_t taken = even.before(place);
        return better.before(place) + (taken < spare ? taken : spare);
      };
      for (int i = t; i < call.count; i += threads) {
        if (!better.has(i) && !(even.has(i) && even.before(i) < spare)) continue;
        const int64_t at = to + number(i);
        const int32_t parent = row_above(parents, i);
        call.tokens[at] = pool.tokens[row + i];
        call.parents[at] = parent < 0 ? -1 : static_cast<int32_t>(number(parent));
        call.scores[at] = scores[i];
      }
    });
  }
};

struct LayOut {
  static constexpr int threads = 64;
  aserve_lay_out call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t tree = block.x(), begin = call.row_start[tree];
    const int32_t rows = static_cast<int32_t>(call.row_start[tree + 1] - begin);
    const int32_t* parents = call.parents + begin;
    block.each_alone([&](int t) {
      for (int32_t row = t; row < rows; row += threads) {
        int32_t depth = -1;
        for (int32_t word = 0; word < call.words; ++word) {
          uint64_t bits = 0;
          depth = -1;
          for (int32_t at = row; at >= 0; at = row_above(parents, at), ++depth) {
            if (at / 64 == word) bits |= bit_of(at);
          }
          call.mask[(begin + row) * call.words + word] = bits;
        }
        call.positions[begin + row] = call.starts[tree] + depth;
        int32_t child = row + 1, sibling = parents[row] < 0 ? rows : row + 1;
        while (child < rows && parents[child] != row) ++child;
        while (sibling < rows && parents[sibling] != parents[row]) ++sibling;
        call.first_child[begin + row] = child < rows ? child : -1;
        call.next_sibling[begin + row] = sibling < rows ? sibling : -1;
      }
    });
  }
};

struct Accept {
  static constexpr int threads = 32;
  aserve_accept call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const int64_t n = block.x();
    const int32_t begin = call.row_start[n], rows = call.row_start[n + 1] - begin;
    const int32_t* drawn = call.drawn + begin;
    int32_t* path = call.path + begin;
    // The walk is one pass over the rows; what it found is written by all.
    block.each([&](int t) {
      if (t != 0) return;
      const int32_t length =
          accept_path(call.parents + begin, call.tokens + begin, drawn, rows, path);
      call.lengths[n] = length;
      call.next[n] = length > 0 ? drawn[path[length - 1]] : -1;
    });
    block.each_alone([&](int t) {
      const int32_t length = call.lengths[n];
      for (int32_t i = t; i < rows; i += threads) {
        const int32_t row = i < length ? path[i] : -1;
        path[i] = row;
        call.kept[begin + i] = row < 0 ? -1 : drawn[row];
        if (call.slots == nullptr) continue;
        const bool moves = row >= 0 && row != i;
        call.from_slots[begin + i] = moves ? call.slots[begin + row] : -1;
        call.to_slots[begin + i] = moves ? call.slots[begin + i] : -1;
      }
    });
  }
};

// A block for each pool and sequence. A thread has the same part of every token, so that it alone reads
// what it alone writes, pair after pair, and waits for nobody.
template <class Unit>
struct Compact {
  static constexpr int threads = 64;
  aserve_compact call;

  template <class B>
  ASERVE_DEVICE void operator()(B& block) const {
    const PageShape shape = {call.pages, call.page_size, 1, call.token_bytes, call.page_stride};
    const int64_t slots = call.pages * call.page_size;
    const int32_t begin = call.starts[block.y()], end = call.starts[block.y() + 1];
    block.each_alone([&](int t) {
      char* pool = reinterpret_cast<char*>(static_cast<uintptr_t>(call.pools[block.x()]));
      const int64_t units = call.token_bytes / static_cast<int64_t>(sizeof(Unit));
      for (int64_t unit = t; unit < units; unit += threads) {
        for (int32_t i = begin; i < end; ++i) {
          const int64_t from = call.from_slots[i], to = call.to_slots[i];
          if (from < 0 || from >= slots || to < 0 || to >= slots) continue;
          Unit* target = reinterpret_cast<Unit*>(pool + slot_offset(shape, to)) + unit;
          *target = reinterpret_cast<const Unit*>(pool + slot_offset(shape, from))[unit];
        }
      }
    });
  }
};

}  // namespace aserve

extern "C" {

int aserve_cuda_under_noise(const aserve_noise* call, void* stream) {
  using namespace aserve;
  if (call->m > noisy_max) return 1;  // cudaErrorInvalidValue
  return launch(UnderNoise{*call}, {call->n}, call->m * 8, stream);
}

int aserve_cuda_expand(const aserve_tree_pool* pool, const aserve_expand* call, void* stream) {
  return aserve::launch(aserve::Expand{*pool, *call}, {pool->n}, 0, stream);
}

int aserve_cuda_select(const aserve_tree_pool* pool, const aserve_select* call, void* stream) {
  using namespace aserve;
  if (call->count > candidates_max) return 1;  // cudaErrorInvalidValue
  return launch(Select{*pool, *call}, {pool->n}, Select::shared_bytes(call->count), stream);
}

int aserve_cuda_lay_out(const aserve_lay_out* call, void* stream) {
  return aserve::launch(aserve::LayOut{*call}, {call->n}, 0, stream);
}

int aserve_cuda_accept(const aserve_accept* call, void* stream) {
  return aserve::launch(aserve::Accept{*call}, {call->n}, 0, stream);
}

int aserve_cuda_compact(const aserve_compact* call, void* stream) {
  using namespace aserve;
  const Grid grid = {call->token_bytes > 0 ? call->n : 0, call->sequences};
  const int64_t bits = call->alignment | call->token_bytes | call->page_stride;
  if (bits % 16 == 0) return launch(Compact<Unit16>{*call}, grid, 0, stream);
  if (bits % 4 == 0) return launch(Compact<uint32_t>{*call}, grid, 0, stream);
  return launch(Compact<uint8_t>{*call}, grid, 0, stream);
}

}  // extern "C"
