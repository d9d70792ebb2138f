// The likeliest tokens of rows of logits, by the passes that sampling is made of.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "aserve/cpu.h"
#include "aserve/tree.h"
#include "sample_kernels.h"

namespace aserve {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t few = 32;  // so many are kept in order as they are found

// Of the thread, grown as needed.
struct Space {
  std::vector<float> block_max, maxima, values;
  std::vector<int32_t> ids, order;

  void fit(int64_t vocab) {
    if (static_cast<int64_t>(values.size()) >= vocab) return;
    const int64_t blocks = (vocab + block_len - 1) / block_len;
    block_max.resize(static_cast<size_t>(blocks));
    maxima.resize(static_cast<size_t>(blocks));
    values.resize(static_cast<size_t>(vocab));
    ids.resize(static_cast<size_t>(vocab));
  }
};

const SampleKernels& kernels_in_force() {
#if defined(__x86_64__)
  if (level() >= Level::avx512) return sample_avx512;
#endif
  return sample_generic;
}

// A value that at least k reach, and few more; the least finite one where there are not so many.
float floor_of(const Blocks& row, int64_t k, std::vector<float>& maxima) {
  const int64_t blocks = row.count();
  if (k > blocks) return -FLT_MAX;
  std::memcpy(maxima.data(), row.max, sizeof(float) * static_cast<size_t>(blocks));
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.begin() + blocks,
                   std::greater<float>());
  return std::max(-FLT_MAX, maxima[static_cast<size_t>(k - 1)]);
}

// The places of the k best of n values, best first, of equals the first; returns how many there are.
int64_t best_values(const float* values, int64_t n, int64_t k, std::vector<int32_t>& order) {
  const int64_t wanted = std::min(n, k);
  if (k > few) {
    order.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int32_t a, int32_t b) {
      return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    return wanted;
  }
  order.resize(static_cast<size_t>(few));
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (found == k && values[i] <= values[order[static_cast<size_t>(found - 1)]]) continue;
    int64_t at = found < k ? found++ : found - 1;
    for (; at > 0 && values[order[static_cast<size_t>(at - 1)]] < values[i]; --at) {
      order[static_cast<size_t>(at)] = order[static_cast<size_t>(at - 1)];
    }
    order[static_cast<size_t>(at)] = static_cast<int32_t>(i);
  }
  return wanted;
}

void top_row(const TreeTop& c, int64_t row, const SampleKernels& kernels, Space& mine) {
  const float* x = c.logits + row * c.stride;
  float* logprobs = c.logprobs + row * c.k;
  int32_t* tokens = c.tokens + row * c.k;
  const Extent extent = kernels.extent(x, c.vocab, mine.block_max.data());
  const bool ok = !extent.nan && extent.max > -infinity && extent.max < infinity;
  int64_t told = 0;
  if (ok) {
    const Blocks blocks = {x, c.vocab, mine.block_max.data()};
    const Gumbel plain = {-FLT_MAX, extent.max, 1.0, 0};
    const double total = std::log(kernels.mass(blocks, plain, -FLT_MAX, extent.max).total);
    const float floor = floor_of(blocks, c.k, mine.maxima);
    const int64_t n = kernels.gather(blocks, floor, mine.values.data(), mine.ids.data());
    told = best_values(mine.values.data(), n, c.k, mine.order);
    for (int64_t i = 0; i < told; ++i) {
      const int32_t place = mine.order[static_cast<size_t>(i)];
      const double above = static_cast<double>(mine.values[static_cast<size_t>(place)]) - extent.max;
      logprobs[i] = static_cast<float>(above - total);
      tokens[i] = mine.ids[static_cast<size_t>(place)];
    }
  }
  for (int64_t i = told; i < c.k; ++i) {
    logprobs[i] = ok ? -infinity : NAN;
    tokens[i] = static_cast<int32_t>(i);
  }
}

}  // namespace

void top_tokens(Team& team, const TreeTop& call) {
  const SampleKernels& kernels = kernels_in_force();
  team.run(call.rows, [&](int64_t row) {
    static thread_local Space mine;
    mine.fit(call.vocab);
    top_row(call, row, kernels, mine);
  });
}

}  // namespace aserve
