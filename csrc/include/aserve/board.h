// Collectives between processes of one host through shared memory: no copies through a kernel, no
// spinning; who waits sleeps on a futex.
//
// Every rank has two halves of a slot. A call is posted as: data and words into the half that is
// free, then compared with what peers posted, then counted at the group's gate; the last to come
// wakes the others, and each reads its peers' halves where they lie. A half is written again only
// when all who may read it have said they are done, which two halves make true without waiting
// unless calls of different groups alternate. Tensors larger than a half go in rounds.
//
// Bytes a rank moves, N being one rank's tensor, n the ranks, B its blocks, R what it receives:
//   reduce    writes N to its half, reads (n - 1) N from peers and N of its own, writes N / B
//             (all_reduce) or N / (B n) (reduce_scatter, which reads N of all likewise in 1 / n)
//   gather    writes N, reads R - N from peers, writes R       exchange  writes N, writes R
// and per round one futex sleep and, for the last to come, one wake: at 4 KiB these are all it is.
// The least for a sum would be 2 N reads and 2 N writes with a second meeting; at n = 2 that is no
// less than here, and a meeting costs more than the copies of a decode step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace aserve {

constexpr int board_groups = 8;   // groups a rank is in, at most
constexpr int board_dims = 8;     // dimensions of a tensor, at most
constexpr int64_t board_text = 12288;  // bytes of a failure, at most

enum class Met { ok, broken, timeout, mismatch };

// What a call says about itself: the first `agreed` words must be the same on all ranks.
struct Words {
  const int64_t* at;
  int n, agreed;
};

// parts is [blocks, n], float or double; out gets the sums of [from, to) over ranks, then blocks.
struct Reduction {
  const char* parts;
  int64_t blocks, n, from, to;
  char* out;
  bool is_double;
};

// What goes into a half: `n` pieces of `bytes` each, `stride` apart; sizes by place of an exchange.
struct Post {
  const char* x;
  int64_t n, bytes, stride;
  const int64_t* sends = nullptr;
  const int64_t* receives = nullptr;
};

// Bytes by place in the group.
struct Sizes {
  const int64_t* sends;
  const int64_t* receives;
};

struct Gate;     // where a group meets
struct Half;     // one of two places where a rank posts
struct Segment;  // the shared memory, as one rank maps it

class Board {
 public:
  static int64_t bytes(int ranks, int64_t half_bytes);
  static int words_max(int ranks) { return 8 + board_dims + 2 * ranks; }

  // Maps `bytes` of a file that begins as zeros. Throws std::runtime_error where that fails or the
  // file is of another shape or already has this rank.
  Board(int file, int ranks, int rank, int64_t half_bytes, int64_t limit_ns);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int attached() const;
  // Groups of ranks of this board are opened once, in any order; `index` is the same on all members
  // and differs between the groups of one rank.
  int open_group(int index, std::vector<int> members);

  // Calls of one thread. `peers()` are then the rank that differs, or those missing at a timeout.
  Met reduce(int group, Words words, const Reduction& call);
  Met gather(int group, Words words, const char* x, const int64_t* sizes, char* out);
  Met exchange(int group, Words words, const char* x, const Sizes& sizes, char* out);
  const std::vector<int>& peers() const { return peers_; }

  // Of any thread. The first failure stays and wakes everybody.
  void fail(const std::string& text);
  bool broken() const;
  std::string failure() const;  // empty while there is none, or while it is being written
  // The words of a rank's last call and how many were agreed; empty if there is none to be had.
  std::vector<int64_t> last(int rank, int* agreed, bool* waiting) const;

 private:
  struct Group {
    int index;
    uint64_t key;  // the same on all members, unlike that of any other group; in the high bits
    std::vector<int> members;
    int place;
    uint64_t round;
  };

  Met meet(int group, Words words, const Post& post);
  void fill(Half& half, Words words, const Post& post, int members);
  bool agrees(const Group& group, Words words, const Post& post);
  bool same(Half& half, Words words, const Post& post, int mine, size_t place) const;
  bool waits_elsewhere(const Group& here, int rank) const;
  Met wait_arrived(const Group& group);
  Met wait_read(int half);
  void done_reading(const Group& group);

  Gate& gate(const Group& group) const;
  Half* posted(const Group& group, int rank) const;
  const char* posted_data(const Group& group, int rank) const;
  // All that a rank sends in an exchange; *before: to ranks before this one.
  int64_t sent_by(const Group& group, size_t place, int64_t* before) const;

  Segment* segment_;
  void* memory_;
  int64_t bytes_;
  int ranks_, rank_;
  int64_t half_bytes_, limit_ns_;
  std::vector<Group> groups_;
  std::vector<int> peers_;
  int half_ = 0;  // written next
  struct Use {
    int group = -1;
    uint64_t round = 0;
  } uses_[2];
};

}  // namespace aserve
