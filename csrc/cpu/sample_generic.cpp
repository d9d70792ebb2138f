// Sampling passes in plain C++.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "sample_kernels.h"

namespace aserve {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

Extent extent(const float* x, int64_t n, float* block_max) {
  Extent out = {-infinity, false};
  for (int64_t start = 0; start < n; start += block_len) {
    float most = -infinity;
    for (int64_t i = start; i < std::min(n, start + block_len); ++i) {
      out.nan |= x[i] != x[i];
      if (x[i] > most) most = x[i];
    }
    block_max[start / block_len] = most;
    if (most > out.max) out.max = most;
  }
  return out;
}

void masked_copy(const float* x, const uint32_t* mask, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = mask[i / 32] >> (i % 32) & 1 ? x[i] : -infinity;
}

double sum_exp(const float* x, int64_t n, float max, double scale) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += std::exp((static_cast<double>(x[i]) - max) * scale);
  return total;
}

// Calls visit(i) for each i, in order, of the blocks that reach `threshold`.
template <class Visit>
void each_above(const Blocks& row, float threshold, const Visit& visit) {
  for (int64_t block = 0; block < row.count(); ++block) {
    if (!(row.max[block] >= threshold)) continue;
    const int64_t start = block * block_len, end = std::min(row.n, start + block_len);
    for (int64_t i = start; i < end; ++i) {
      if (row.x[i] >= threshold) visit(i);
    }
  }
}

Mass mass(const Blocks& row, const Gumbel& gumbel, float kept, float value) {
  Mass out = {0, 0};
  each_above(row, kept, [&](int64_t i) {
    const double weight = std::exp((static_cast<double>(row.x[i]) - gumbel.max) * gumbel.scale);
    out.total += weight;
    if (row.x[i] > value) out.above += weight;
  });
  return out;
}

int64_t gather(const Blocks& row, float threshold, float* values, int32_t* ids) {
  int64_t count = 0;
  each_above(row, threshold, [&](int64_t i) {
    values[count] = row.x[i];
    ids[count++] = static_cast<int32_t>(i);
  });
  return count;
}

int64_t gumbel_argmax(const Blocks& row, const Gumbel& gumbel) {
  double best = -std::numeric_limits<double>::infinity();
  int64_t winner = row.n;
  each_above(row, gumbel.threshold, [&](int64_t i) {
    const double logit = (static_cast<double>(row.x[i]) - gumbel.max) * gumbel.scale;
    if (logit + noise_max < best) return;
    const uint32_t bits = noise_bits(gumbel.key, static_cast<uint32_t>(i));
    if (logit + gumbel_bound(bits) < best) return;
    const double score = logit + gumbel_noise(bits);
    if (score > best) best = score, winner = i;
  });
  return winner;
}

}  // namespace

const SampleKernels sample_generic = {extent, masked_copy, sum_exp, mass, gather, gumbel_argmax};

}  // namespace aserve
