// The calls of a board: what goes into the halves round by round, and what is made of the peers'.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "aserve/board.h"

namespace aserve {
namespace {

// out = ((first + next) + next) + ... of n elements, a tile at a time so that it stays near.
constexpr int64_t tile = 1024;

template <class Float>
void sum(const std::vector<const char*>& blocks, int64_t n, char* out) {
  for (int64_t from = 0; from < n; from += tile) {
    const int64_t count = std::min(tile, n - from);
    auto* total = reinterpret_cast<Float*>(out) + from;
    std::memcpy(total, reinterpret_cast<const Float*>(blocks[0]) + from, count * sizeof(Float));
    for (size_t b = 1; b < blocks.size(); ++b) {
      const auto* block = reinterpret_cast<const Float*>(blocks[b]) + from;
      for (int64_t i = 0; i < count; ++i) total[i] += block[i];
    }
  }
}

// The part of [start, start + size) that lies in [from, to), relative to start.
struct Overlap {
  int64_t from, to;
};
Overlap overlap(int64_t start, int64_t size, int64_t from, int64_t to) {
  return {std::max(start, from) - start, std::min(start + size, to) - start};
}

}  // namespace

Met Board::reduce(int number, Words words, const Reduction& call) {
  const Group& group = groups_[number];
  const int64_t item = call.is_double ? 8 : 4;
  const int64_t room = half_bytes_ / (call.blocks * item);
  const int64_t step = room >= 16 ? room / 16 * 16 : room;
  std::vector<const char*> blocks(group.members.size() * call.blocks);
  int64_t start = 0;
  do {
    const int64_t count = std::min(step, call.n - start);
    const char* x = call.parts + start * item;
    const Met met = meet(number, words, {x, call.blocks, count * item, call.n * item});
    if (met != Met::ok) return met;
    const int64_t from = std::max(start, call.from), to = std::min(start + count, call.to);
    if (from < to) {
      auto block = blocks.begin();
      for (const int rank : group.members) {
        const bool ours = rank == rank_;
        const char* data = ours ? x : posted_data(group, rank);
        for (int64_t b = 0; b < call.blocks; ++b) {
          *block++ = data + (b * (ours ? call.n : count) + from - start) * item;
        }
      }
      char* out = call.out + (from - call.from) * item;
      call.is_double ? sum<double>(blocks, to - from, out) : sum<float>(blocks, to - from, out);
    }
    done_reading(group);
    start += step;
  } while (start < call.n);
  return Met::ok;
}

Met Board::gather(int number, Words words, const char* x, const int64_t* sizes, char* out) {
  const Group& group = groups_[number];
  const size_t n = group.members.size();
  const int64_t most = *std::max_element(sizes, sizes + n);
  int64_t start = 0;
  do {
    const auto left = [&](size_t place) {
      return std::clamp<int64_t>(sizes[place] - start, 0, half_bytes_);
    };
    const Met met = meet(number, words, {x + start, 1, left(group.place), 0});
    if (met != Met::ok) return met;
    char* to = out + start;
    for (size_t place = 0; place < n; to += sizes[place++]) {
      if (left(place) == 0) continue;
      const int rank = group.members[place];
      std::memcpy(to, rank == rank_ ? x + start : posted_data(group, rank), left(place));
    }
    done_reading(group);
    start += half_bytes_;
  } while (start < most);
  return Met::ok;
}

Met Board::exchange(int number, Words words, const char* x, const Sizes& sizes, char* out) {
  const Group& group = groups_[number];
  const size_t n = group.members.size();
  const int64_t given = std::accumulate(sizes.sends, sizes.sends + n, int64_t{0});
  int64_t most = 0, start = 0;
  std::vector<int64_t> before(n);  // where what a rank sends us starts in what it sends to all
  do {
    const int64_t bytes = std::clamp<int64_t>(given - start, 0, half_bytes_);
    const Met met = meet(number, words, {x + start, 1, bytes, 0, sizes.sends, sizes.receives});
    if (met != Met::ok) return met;
    char* to = out;
    for (size_t place = 0; place < n; to += sizes.receives[place++]) {
      if (start == 0) most = std::max(most, sent_by(group, place, &before[place]));
      const int rank = group.members[place];
      const Overlap here = overlap(start, half_bytes_, before[place],
                                   before[place] + sizes.receives[place]);
      if (here.from >= here.to) continue;
      const char* data = rank == rank_ ? x + start : posted_data(group, rank);
      std::memcpy(to + start + here.from - before[place], data + here.from, here.to - here.from);
    }
    done_reading(group);
    start += half_bytes_;
  } while (start < most);
  return Met::ok;
}

}  // namespace aserve
