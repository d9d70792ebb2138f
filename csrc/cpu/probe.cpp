// Streams with the widest loads there are; tiles in a square of two by two, as linear.h uses them.
#include "aserve/probe.h"

#include <algorithm>
#include <atomic>

#include "aserve/cpu.h"
#include "target.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aserve {
namespace {

uint64_t read_words(const uint64_t* words, int64_t n) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < n; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sum[j] += words[i + j];
  }
  for (int64_t j = 1; j < 8; ++j) sum[0] += sum[j];
  return sum[0];
}

}  // namespace
}  // namespace aserve

#if defined(__x86_64__)
ASERVE_TARGET_BEGIN(ASERVE_TARGET_AVX512)
namespace aserve {
namespace {

uint64_t read_wide(const uint64_t* words, int64_t n) {
  __m512i sum[4] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int64_t j = 0; j < 4; ++j) {
      sum[j] = _mm512_add_epi64(sum[j], _mm512_load_si512(words + i + 8 * j));
    }
  }
  for (; i < n; i += 8) sum[0] = _mm512_add_epi64(sum[0], _mm512_load_si512(words + i));
  const __m512i all = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]),
                                       _mm512_add_epi64(sum[2], sum[3]));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
}

}  // namespace
}  // namespace aserve
ASERVE_TARGET_END

ASERVE_TARGET_BEGIN(ASERVE_TARGET_AMX)
#include "amx.h"

namespace aserve {
namespace {

void multiply_tiles(int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  tile_configure(config);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t i = 0; i < rounds; ++i) {
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
  tile_release();
}

}  // namespace
}  // namespace aserve
ASERVE_TARGET_END
#endif

namespace aserve {

uint64_t probe_read(Team& team, const void* data, int64_t bytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  const int64_t lines = bytes / 64, tasks = std::min<int64_t>(lines, 8 * team.threads());
  std::atomic<uint64_t> sum{0};
  team.run(tasks, [&](int64_t i) {
    const int64_t begin = lines * i / tasks * 8, end = lines * (i + 1) / tasks * 8;
#if defined(__x86_64__)
    if (level() >= Level::avx512) {
      sum += read_wide(words + begin, end - begin);
      return;
    }
#endif
    sum += read_words(words + begin, end - begin);
  });
  return sum;
}

int64_t probe_products(Team& team, int64_t rounds) {
#if defined(__x86_64__)
  if (level() == Level::amx) {
    team.run(team.threads(), [&](int64_t) { multiply_tiles(rounds); });
    constexpr int64_t product = 2 * 16 * 16 * 32;
    return team.threads() * rounds * 4 * product;
  }
#endif
  (void)team, (void)rounds;
  return 0;
}

}  // namespace aserve
