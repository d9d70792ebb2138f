#include "aserve/attention.h"

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace aserve {
namespace {

// Enough lanes that a block of keys, once loaded, is used often; few enough to share out.
constexpr int64_t lanes_task = 192;

// A decoding sequence is one task where there are enough of them, so that the rows of its pages are
// read once and in order; otherwise heads are shared out. Later rows see more keys: they go first.
std::vector<AttentionTask> split(const Attention& call, int threads) {
  const int64_t kv_heads = call.k_shape.heads, group = call.heads / kv_heads;
  const int64_t rows_task = std::max<int64_t>(1, lanes_task / group);
  const bool many = call.sequences >= 2 * threads || threads == 1;
  std::vector<AttentionTask> tasks;
  for (int64_t n = 0; n < call.sequences; ++n) {
    const int64_t first = call.row_start[n], end = call.row_start[n + 1];
    const int64_t step = many && (end - first) * group <= 16 ? kv_heads : 1;
    for (int64_t begin = first; begin < end; begin += rows_task) {
      for (int64_t head = 0; head < kv_heads; head += step) {
        tasks.push_back({&call, n, head, head + step, begin, std::min(begin + rows_task, end),
                         call.positions + begin});
      }
    }
  }
  std::reverse(tasks.begin(), tasks.end());
  return tasks;
}

}  // namespace

void attention(Team& team, const Attention& call) {
  const std::vector<AttentionTask> tasks = split(call, team.threads());
  const Kernels& k = kernels();
#if defined(__x86_64__)
  if (level() == Level::amx && amx_attention_fits(call)) {
    team.run(static_cast<int64_t>(tasks.size()),
             [&](int64_t i) { amx_attention(tasks[static_cast<size_t>(i)]); });
    return;
  }
#endif
  team.run(static_cast<int64_t>(tasks.size()),
           [&](int64_t i) { k.attention(tasks[static_cast<size_t>(i)]); });
}

}  // namespace aserve
