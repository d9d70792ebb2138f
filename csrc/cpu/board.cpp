#include "aserve/board.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace aserve {

using Word = std::atomic<uint32_t>;
using Count = std::atomic<uint64_t>;
using Number = std::atomic<int64_t>;
constexpr auto relaxed = std::memory_order_relaxed;
static_assert(Number::is_always_lock_free && sizeof(Number) == 8, "words are shared as they are");

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

#if defined(__linux__)
void sleep_while(Word& word, uint32_t value, int64_t until_ns) {
  const timespec until{until_ns / 1000000000, until_ns % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, value, &until, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

void wake_all(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
          0);
}

void* map_shared(int file, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
  return memory;
}

void unmap(void* memory, int64_t bytes) { munmap(memory, static_cast<size_t>(bytes)); }
#else
void sleep_while(Word&, uint32_t, int64_t) {}
void wake_all(Word&) {}
void* map_shared(int, int64_t) { throw std::runtime_error("shared-memory planes need Linux"); }
void unmap(void*, int64_t) {}
#endif

// Somewhere to sleep. Whoever changes what sleepers wait for rings; all is sequentially consistent:
// either the ringer sees the sleeper, or the sleeper sees what changed.
struct alignas(64) Bell {
  Word rung;
  Word sleepers;

  void ring() {
    rung.fetch_add(1);
    if (sleepers.load() > 0) wake_all(rung);
  }

  // Sleeps until check() says something other than timeout, or to the end.
  template <class Check>
  Met wait(int64_t limit_ns, const Check& check) {
    Met met = check();
    if (met != Met::timeout) return met;
    const int64_t until_ns = now_ns() + limit_ns;
    sleepers.fetch_add(1);
    for (;;) {
      const uint32_t seen = rung.load();
      met = check();
      if (met != Met::timeout || now_ns() >= until_ns) break;
      sleep_while(rung, seen, until_ns);
    }
    sleepers.fetch_sub(1);
    return met;
  }
};

}  // namespace

// Where a group meets; it lies with the group's first rank.
struct alignas(64) Gate {
  Bell all_came;
  Bell all_read;
  Count arrived;  // over all rounds
};

struct alignas(64) Half {
  Count at;  // group and round of what is in it, 0 while it is written
  Number n, agreed;
  Number exchanges;  // whether sizes follow the words
};

namespace {

struct alignas(64) Rank {
  Gate gates[board_groups];
  Count done[board_groups];  // rounds of each group read to the end
  Word attached;
  Word last_half;
  Word waiting;
};

struct alignas(64) Head {
  Count shape;
  Word attached;
  Word state;  // 0 good, 1 a failure is being written, 2 it is written
  Number text_bytes;
  char text[board_text];
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t half_stride(int ranks, int64_t half_bytes) {
  const int64_t words = Board::words_max(ranks) + 2 * ranks;
  return round_up(int64_t{sizeof(Half)} + words * int64_t{sizeof(Number)}, 4096) +
         round_up(half_bytes, 4096);
}

int64_t rank_stride(int ranks, int64_t half_bytes) {
  return round_up(sizeof(Rank), 4096) + 2 * half_stride(ranks, half_bytes);
}

}  // namespace

struct Segment {
  char* memory;
  int ranks;
  int64_t half_bytes;

  Head& head() const { return *reinterpret_cast<Head*>(memory); }
  char* rank_at(int rank) const {
    return memory + round_up(sizeof(Head), 4096) + rank * rank_stride(ranks, half_bytes);
  }
  Rank& rank(int rank) const { return *reinterpret_cast<Rank*>(rank_at(rank)); }
  Half& half(int rank, int which) const {
    return *reinterpret_cast<Half*>(rank_at(rank) + round_up(sizeof(Rank), 4096) +
                                    which * half_stride(ranks, half_bytes));
  }
  Number* words(Half& half) const { return reinterpret_cast<Number*>(&half + 1); }
  Number* sends(Half& half) const { return words(half) + Board::words_max(ranks); }
  Number* receives(Half& half) const { return sends(half) + ranks; }
  char* data(Half& half) const {
    return reinterpret_cast<char*>(&half) + half_stride(ranks, half_bytes) -
           round_up(half_bytes, 4096);
  }
};

int64_t Board::bytes(int ranks, int64_t half_bytes) {
  return round_up(sizeof(Head), 4096) + ranks * rank_stride(ranks, half_bytes);
}

Board::Board(int file, int ranks, int rank, int64_t half_bytes, int64_t limit_ns)
    : segment_(nullptr),
      memory_(map_shared(file, bytes(ranks, half_bytes))),
      bytes_(bytes(ranks, half_bytes)),
      ranks_(ranks),
      rank_(rank),
      half_bytes_(half_bytes),
      limit_ns_(limit_ns) {
  const Segment segment{static_cast<char*>(memory_), ranks, half_bytes};
  const uint64_t shape = static_cast<uint64_t>(half_bytes) << 16 | static_cast<uint64_t>(ranks);
  uint64_t found = 0;
  const bool fits = segment.head().shape.compare_exchange_strong(found, shape) || found == shape;
  if (!fits || segment.rank(rank).attached.exchange(1) != 0) {
    unmap(memory_, bytes_);
    throw std::runtime_error(fits ? "the segment has this rank already"
                                  : "the segment was made for other ranks or sizes");
  }
  segment.head().attached.fetch_add(1);
  segment_ = new Segment(segment);
}

Board::~Board() {
  delete segment_;
  unmap(memory_, bytes_);
}

int Board::attached() const { return static_cast<int>(segment_->head().attached.load()); }

int Board::open_group(int index, std::vector<int> members) {
  const auto mine = std::find(members.begin(), members.end(), rank_);
  const int place = static_cast<int>(mine - members.begin());
  const uint64_t key = static_cast<uint64_t>(members[0] * board_groups + index + 1) << 48;
  groups_.push_back({index, key, std::move(members), place, 0});
  return static_cast<int>(groups_.size()) - 1;
}

bool Board::broken() const { return segment_->head().state.load() == 2; }

// One round: post, compare, be counted, wait for the others. Then their halves may be read until
// done_reading.
Met Board::meet(int number, Words words, const Post& post) {
  Group& group = groups_[number];
  peers_.clear();
  if (broken()) return Met::broken;
  const Met free = wait_read(half_);
  if (free != Met::ok) return free;
  Half& half = segment_->half(rank_, half_);
  ++group.round;
  half.at.store(0);
  fill(half, words, post, static_cast<int>(group.members.size()));
  half.at.store(group.key | group.round);
  uses_[half_] = {number, group.round};
  Rank& mine = segment_->rank(rank_);
  mine.last_half.store(static_cast<uint32_t>(half_));
  mine.waiting.store(1);
  half_ ^= 1;
  // Of two that do not agree at least one sees the other here, and is then never counted.
  const Met met = agrees(group, words, post) ? wait_arrived(group) : Met::mismatch;
  mine.waiting.store(0);
  return met;
}

void Board::fill(Half& half, Words words, const Post& post, int members) {
  half.n.store(words.n);
  half.agreed.store(words.agreed);
  for (int i = 0; i < words.n; ++i) segment_->words(half)[i].store(words.at[i], relaxed);
  half.exchanges.store(post.sends != nullptr);
  for (int i = 0; post.sends != nullptr && i < members; ++i) {
    segment_->sends(half)[i].store(post.sends[i], relaxed);
    segment_->receives(half)[i].store(post.receives[i], relaxed);
  }
  char* data = segment_->data(half);
  for (int64_t i = 0; i < post.n && post.bytes > 0; ++i) {
    std::memcpy(data + i * post.bytes, post.x + i * post.stride, static_cast<size_t>(post.bytes));
  }
}

// The half in which a rank posted this round of the group, or null.
Half* Board::posted(const Group& group, int rank) const {
  for (int which = 0; which < 2; ++which) {
    Half& half = segment_->half(rank, which);
    if (half.at.load() == (group.key | group.round)) return &half;
  }
  return nullptr;
}

const char* Board::posted_data(const Group& group, int rank) const {
  return segment_->data(*posted(group, rank));
}

int64_t Board::sent_by(const Group& group, size_t place, int64_t* before) const {
  const Number* sends = segment_->sends(*posted(group, group.members[place]));
  int64_t all = 0;
  for (size_t to = 0; to < group.members.size(); ++to) {
    if (static_cast<int>(to) == group.place) *before = all;
    all += sends[to].load(relaxed);
  }
  return all;
}

bool Board::agrees(const Group& group, Words words, const Post& post) {
  for (size_t place = 0; place < group.members.size(); ++place) {
    const int rank = group.members[place];
    if (rank == rank_) continue;
    Half* half = posted(group, rank);
    const bool parted = half == nullptr ? waits_elsewhere(group, rank)
                                        : !same(*half, words, post, group.place, place);
    if (parted) {
      peers_.assign(1, rank);
      return false;
    }
  }
  return true;
}

bool Board::same(Half& half, Words words, const Post& post, int mine, size_t place) const {
  if (half.agreed.load() != words.agreed) return false;
  if (half.exchanges.load() != (post.sends != nullptr)) return false;
  for (int i = 0; i < words.agreed; ++i) {
    if (segment_->words(half)[i].load(relaxed) != words.at[i]) return false;
  }
  return post.sends == nullptr ||
         (segment_->sends(half)[mine].load(relaxed) == post.receives[place] &&
          segment_->receives(half)[mine].load(relaxed) == post.sends[place]);
}

// Whether a rank waits in another group for us, who now wait for it here: neither would ever come.
bool Board::waits_elsewhere(const Group& here, int rank) const {
  const uint64_t last = segment_->rank(rank).last_half.load();
  const uint64_t at = segment_->half(rank, static_cast<int>(last)).at.load();
  for (const Group& group : groups_) {
    if (at >> 48 != group.key >> 48 || group.key == here.key) continue;
    const uint64_t round = at & ((uint64_t{1} << 48) - 1);
    return gate(group).arrived.load() < round * group.members.size();
  }
  return false;
}

Gate& Board::gate(const Group& group) const {
  return segment_->rank(group.members[0]).gates[group.index];
}

Met Board::wait_arrived(const Group& group) {
  Gate& gate = this->gate(group);
  const uint64_t all = group.round * group.members.size();
  if (gate.arrived.fetch_add(1) + 1 == all) {
    gate.all_came.ring();
    return Met::ok;
  }
  const Met met = gate.all_came.wait(limit_ns_, [&] {
    if (gate.arrived.load() >= all) return Met::ok;
    return broken() ? Met::broken : Met::timeout;
  });
  for (const int rank : group.members) {
    if (met == Met::timeout && posted(group, rank) == nullptr) peers_.push_back(rank);
  }
  return met;
}

// Until nobody reads any more what lies in a half of ours.
Met Board::wait_read(int which) {
  if (uses_[which].group < 0) return Met::ok;
  const Group& group = groups_[uses_[which].group];
  const auto behind = [&](int rank) {
    return rank != rank_ && segment_->rank(rank).done[group.index].load() < uses_[which].round;
  };
  const Met met = gate(group).all_read.wait(limit_ns_, [&] {
    if (std::none_of(group.members.begin(), group.members.end(), behind)) return Met::ok;
    return broken() ? Met::broken : Met::timeout;
  });
  for (const int rank : group.members) {
    if (met == Met::timeout && behind(rank)) peers_.push_back(rank);
  }
  return met;
}

void Board::done_reading(const Group& group) {
  segment_->rank(rank_).done[group.index].store(group.round);
  gate(group).all_read.ring();
}

void Board::fail(const std::string& text) {
  Head& head = segment_->head();
  uint32_t good = 0;
  if (!head.state.compare_exchange_strong(good, 1)) return;
  const auto size = std::min<size_t>(text.size(), board_text);
  std::memcpy(head.text, text.data(), size);
  head.text_bytes.store(static_cast<int64_t>(size));
  head.state.store(2);
  for (int rank = 0; rank < ranks_; ++rank) {
    for (Gate& gate : segment_->rank(rank).gates) {
      gate.all_came.ring();
      gate.all_read.ring();
    }
  }
}

std::string Board::failure() const {
  const Head& head = segment_->head();
  return broken() ? std::string(head.text, static_cast<size_t>(head.text_bytes.load())) : "";
}

std::vector<int64_t> Board::last(int rank, int* agreed, bool* waiting) const {
  Rank& of = segment_->rank(rank);
  Half& half = segment_->half(rank, static_cast<int>(of.last_half.load()));
  const uint64_t before = half.at.load();
  *waiting = of.waiting.load() != 0;
  *agreed = static_cast<int>(half.agreed.load());
  const int64_t n = std::clamp<int64_t>(half.n.load(), 0, words_max(ranks_));
  std::vector<int64_t> words(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) words[i] = segment_->words(half)[i].load(relaxed);
  if (before == 0 || half.at.load() != before) words.clear();
  return words;
}

}  // namespace aserve
