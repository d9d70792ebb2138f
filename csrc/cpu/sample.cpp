#include "aserve/sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "aserve/cpu.h"
#include "aserve/threshold.h"
#include "sample_kernels.h"

namespace aserve {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
// Below this a temperature means greedy, as elsewhere in the field.
constexpr double temperature_min = 1e-5;

const SampleKernels& kernels_in_force() {
#if defined(__x86_64__)
  if (level() >= Level::avx512) return sample_avx512;
#endif
  return sample_generic;
}

// Of the thread, grown as needed.
struct Space {
  std::vector<float> logits, values, block_max;
  std::vector<int32_t> ids;

  void fit(int64_t vocab) {
    if (static_cast<int64_t>(logits.size()) >= vocab) return;
    logits.resize(vocab);
    values.resize(vocab);
    ids.resize(vocab);
    block_max.resize((vocab + block_len - 1) / block_len);
  }
};

Space& space(int64_t vocab) {
  static thread_local Space mine;
  mine.fit(vocab);
  return mine;
}

// The row's logits after all that is no filter: its own if nothing changes them.
const float* edited(const DrawRow& row, int64_t vocab, const SampleKernels& kernels, float* y) {
  const bool penalties = row.repetition != 1 || row.frequency != 0 || row.presence != 0;
  const bool counted = penalties && row.seen_n > 0;
  if (row.mask == nullptr && row.bias_n == 0 && !counted && row.banned_n == 0) return row.logits;
  if (row.mask == nullptr) {
    std::memcpy(y, row.logits, sizeof(float) * static_cast<size_t>(vocab));
  } else {
    kernels.masked_copy(row.logits, row.mask, vocab, y);
  }
  const auto inside = [vocab](int32_t id) { return id >= 0 && id < vocab; };
  for (int64_t i = 0; i < row.bias_n; ++i) {
    if (inside(row.bias_ids[i])) {
      float& logit = y[row.bias_ids[i]];
      logit = static_cast<float>(logit + row.bias[i]);
    }
  }
  for (int64_t i = 0; counted && i < row.seen_n; ++i) {
    if (!inside(row.seen_ids[i])) continue;
    double logit = y[row.seen_ids[i]];
    logit = logit > 0 ? logit / row.repetition : logit * row.repetition;
    if (row.seen[i] > 0) logit = logit - row.frequency * row.seen[i] - row.presence;
    y[row.seen_ids[i]] = static_cast<float>(logit);
  }
  for (int64_t i = 0; i < row.banned_n; ++i) {
    if (inside(row.banned[i])) y[row.banned[i]] = -infinity;
  }
  return y;
}

// At least `wanted` values from the top (or all), and their ids; few more if that is cheap.
int64_t gather_top(const Blocks& row, float max, int64_t wanted, const SampleKernels& kernels,
                   Space& mine) {
  float* values = mine.values.data();
  float floor = -FLT_MAX;
  if (wanted <= row.count()) {  // as many blocks reach a value, as many logits do
    std::memcpy(values, row.max, sizeof(float) * static_cast<size_t>(row.count()));
    std::nth_element(values, values + wanted - 1, values + row.count(), std::greater<float>());
    floor = std::max(floor, values[wanted - 1]);
  } else {
    for (float depth = 2; depth < 256; depth *= 1.5f) {
      const int64_t count = kernels.gather(row, max - depth, values, mine.ids.data());
      if (count >= wanted) return count;
    }
  }
  return kernels.gather(row, floor, values, mine.ids.data());
}

// Values that take part in top_p: those at or above `floor`, down to where their mass is enough.
int64_t gather_mass(const Blocks& row, const Gumbel& gumbel, double* target,
                    const SampleKernels& kernels, Space& mine) {
  float* values = mine.values.data();
  if (gumbel.threshold > -FLT_MAX) {  // top_k left few
    const int64_t count = kernels.gather(row, gumbel.threshold, values, mine.ids.data());
    *target *= kernels.sum_exp(values, count, gumbel.max, gumbel.scale);
    return count;
  }
  *target *= kernels.sum_exp(row.x, row.n, gumbel.max, gumbel.scale);
  for (double depth = 3; depth < 64; depth *= 1.6) {
    const float floor = static_cast<float>(gumbel.max - depth / gumbel.scale);
    const int64_t count = kernels.gather(row, floor, values, mine.ids.data());
    const double mass = kernels.sum_exp(values, count, gumbel.max, gumbel.scale);
    if (mass > *target * (1 + 1e-12)) return count;
  }
  return kernels.gather(row, -FLT_MAX, values, mine.ids.data());
}

// The value of the token with which the mass from the top reaches top_p of the whole.
float top_p_threshold(const Blocks& row, const Gumbel& gumbel, double top_p,
                      const SampleKernels& kernels, Space& mine) {
  double target = top_p;
  const int64_t count = gather_mass(row, gumbel, &target, kernels, mine);
  float* values = mine.values.data();
  const auto weight = [&gumbel](float value) {
    return std::exp((static_cast<double>(value) - gumbel.max) * gumbel.scale);
  };
  // [0, low) is above the threshold and weighs `mass`; [high, count) is below it.
  int64_t low = 0, high = count;
  double mass = 0;
  while (high - low > 16) {
    const int64_t middle = (low + high) / 2;
    std::nth_element(values + low, values + middle, values + high, std::greater<float>());
    const double upper =
        mass + kernels.sum_exp(values + low, middle - low, gumbel.max, gumbel.scale);
    if (upper >= target) {
      high = middle;
    } else {
      mass = upper;
      low = middle;
    }
  }
  std::sort(values + low, values + high, std::greater<float>());
  for (int64_t i = low; i < high; ++i) {
    mass += weight(values[i]);
    if (mass >= target) return values[i];
  }
  return high > 0 ? values[high - 1] : -FLT_MAX;
}

// Draws among all that `gumbel` lets through, until what is drawn is of the top_p: the best of many
// is the best of those few among them that it belongs to. That it belongs there needs no threshold,
// only the mass above it. `kept`: of the logits whose mass top_p is a part of.
int64_t draw_top_p(const Blocks& row, Gumbel gumbel, float kept, double top_p,
                   const SampleKernels& kernels, Space& mine) {
  constexpr int rounds_max = 6;
  for (int round = 0; round < rounds_max; ++round) {
    const int64_t winner = kernels.gumbel_argmax(row, gumbel);
    const float value = row.x[winner];
    if (value == gumbel.max) return winner;
    const Mass mass = kernels.mass(row, gumbel, kept, value);
    if (mass.above < top_p * mass.total * (1 - mass_error)) return winner;
    if (mass.above < top_p * mass.total * (1 + mass_error)) break;  // too close to call
    gumbel.threshold = std::nextafter(value, infinity);
  }
  const Gumbel whole = {kept, gumbel.max, gumbel.scale, gumbel.key};
  const float least = top_p_threshold(row, whole, top_p, kernels, mine);
  gumbel.threshold = std::max(gumbel.threshold, least);
  return kernels.gumbel_argmax(row, gumbel);
}

// The least logit that top_k leaves.
float top_k_threshold(const Blocks& row, float max, int64_t top_k, const SampleKernels& kernels,
                      Space& mine) {
  const int64_t count = gather_top(row, max, top_k, kernels, mine);
  float* values = mine.values.data();
  if (count < top_k) return -FLT_MAX;
  std::nth_element(values, values + top_k - 1, values + count, std::greater<float>());
  return values[top_k - 1];
}

// The first of the best.
int64_t best_of(const Blocks& row, float max) {
  int64_t block = 0;
  while (row.max[block] != max) ++block;
  int64_t i = block * block_len;
  while (row.x[i] != max) ++i;
  return i;
}

void draw_row(int64_t vocab, DrawRow& row, const SampleKernels& kernels) {
  Space& mine = space(vocab);
  float* block_max = mine.block_max.data();
  const Extent raw = kernels.extent(row.logits, vocab, block_max);
  const float* x = edited(row, vocab, kernels, mine.logits.data());
  const Extent extent = x == row.logits ? raw : kernels.extent(x, vocab, block_max);
  row.status = raw.nan || extent.nan || raw.max == infinity || extent.max == infinity
                   ? Drawn::not_a_number
               : extent.max == -infinity ? Drawn::none_left
                                         : Drawn::token;
  row.token = -1;
  if (row.status != Drawn::token) return;
  const Blocks blocks = {x, vocab, block_max};
  if (row.temperature < temperature_min) {
    row.token = best_of(blocks, extent.max);
    return;
  }
  Gumbel gumbel = {-FLT_MAX, extent.max, 1.0 / row.temperature, row.key};
  if (row.top_k > 0 && row.top_k < vocab) {
    gumbel.threshold = top_k_threshold(blocks, extent.max, row.top_k, kernels, mine);
  }
  const float kept = gumbel.threshold;
  if (row.min_p > 0) {
    gumbel.threshold = std::max(kept, min_p_threshold(gumbel.max, gumbel.scale, row.min_p));
  }
  row.token = row.top_p < 1 ? draw_top_p(blocks, gumbel, kept, row.top_p, kernels, mine)
                            : kernels.gumbel_argmax(blocks, gumbel);
}

void logprob_row(int64_t vocab, LogprobRow& row, const SampleKernels& kernels) {
  Space& mine = space(vocab);
  const Extent extent = kernels.extent(row.logits, vocab, mine.block_max.data());
  row.ok = !extent.nan && extent.max > -infinity && extent.max < infinity;
  if (!row.ok) return;
  const double total = extent.max + std::log(kernels.sum_exp(row.logits, vocab, extent.max, 1.0));
  row.logprob = row.logits[row.token] - total;
  if (row.top_n == 0) return;
  const Blocks blocks = {row.logits, vocab, mine.block_max.data()};
  const int64_t count = gather_top(blocks, extent.max, row.top_n, kernels, mine);
  int32_t* ids = mine.ids.data();
  const auto better = [&](int32_t a, int32_t b) {
    return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b;
  };
  const int64_t told = std::min(row.top_n, count);
  std::partial_sort(ids, ids + told, ids + count, better);
  for (int64_t i = 0; i < told; ++i) {
    row.top_ids[i] = ids[i];
    row.top_logprobs[i] = row.logits[ids[i]] - total;
  }
  row.top_n = told;
}

template <class Task>
void each(Team* team, int64_t n, const Task& task) {
  if (team != nullptr) return team->run(n, task);
  for (int64_t i = 0; i < n; ++i) task(i);
}

}  // namespace

void draw(Team* team, int64_t vocab, DrawRow* rows, int64_t n) {
  const SampleKernels& kernels = kernels_in_force();
  each(team, n, [&](int64_t i) { draw_row(vocab, rows[i], kernels); });
}

void logprobs(Team* team, int64_t vocab, LogprobRow* rows, int64_t n) {
  const SampleKernels& kernels = kernels_in_force();
  each(team, n, [&](int64_t i) { logprob_row(vocab, rows[i], kernels); });
}

}  // namespace aserve
