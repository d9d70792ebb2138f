#include "aserve/attention.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace aserve {
namespace {

// Enough lanes that a segment of keys, once prepared, is used often; few enough to share out.
constexpr int64_t lanes_least = 96, lanes_most = 384;
constexpr int64_t lanes_apart = 64;          // up to so many may have their segments in many tasks
constexpr int64_t slot_bytes_max = 4 << 20;  // of one merge

// Rows of a sequence that see the same segments, but for the ends.
struct Piece {
  AttentionTask task;  // all heads and keys
  int64_t cost;        // of one head
};

// Of one call; the memory is kept for the next.
struct Tasks {
  std::vector<Piece> pieces;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionMerge> merges;  // as much room as there are pieces: tasks point into it
  std::vector<int64_t> ends;           // of bundles of tasks
};

int64_t segment_of(int64_t key) { return key / key_segment; }

int64_t segments(const AttentionTask& task) {
  return segment_of(task.key_end - 1) - segment_of(task.key_begin) + 1;
}

int64_t cost_of(const AttentionTask& task) {
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t tiles = task.by_row ? rows * ceil_div(task.group(), 16)
                                    : ceil_div(rows * task.group(), 16);
  return tiles * (task.key_end - task.key_begin);
}

// Of rows in any order.
int64_t first_key(const AttentionTask& task) {
  const int32_t* positions = task.call->positions;
  const int32_t lowest =
      *std::min_element(positions + task.row_begin, positions + task.row_end);
  return segment_of(task.first_key(lowest)) * key_segment;
}

void add_rows(const Attention& call, int64_t n, int64_t threads, std::vector<Piece>& pieces) {
  const int64_t first = call.row_start[n], end = call.row_start[n + 1];
  const int64_t group = call.heads / call.k_shape.heads;
  const int64_t lanes = call.row_start[call.sequences] * call.heads / (4 * threads);
  const int64_t step =
      std::max<int64_t>(1, std::clamp(lanes / 32 * 32, lanes_least, lanes_most) / group);
  for (int64_t begin = first; begin < end; begin += step) {
    AttentionTask task{};
    task.call = &call;
    task.sequence = n;
    task.head_end = call.k_shape.heads;
    task.row_begin = begin;
    task.row_end = std::min(begin + step, end);
    task.key_begin = first_key(task);
    task.key_end = call.positions[task.row_end - 1] + 1;
    pieces.push_back({task, cost_of(task)});
  }
}

// All rows together over the segments before the tree, then each over the rest.
void add_tree(const Attention& call, int64_t n, std::vector<Piece>& pieces) {
  AttentionTask task{};
  task.call = &call;
  task.sequence = n;
  task.head_end = call.k_shape.heads;
  task.row_begin = call.row_start[n];
  task.row_end = call.row_start[n + 1];
  int64_t start = INT64_MAX, end = 0;
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    start = std::min(start, key_places(call, row).start);
    end = std::max<int64_t>(end, call.positions[row] + 1);
  }
  const int64_t begin = first_key(task), middle = segment_of(start) * key_segment;
  if (begin < middle) {
    task.key_begin = begin;
    task.key_end = middle;
    pieces.push_back({task, cost_of(task)});
  }
  task.key_begin = std::max(begin, middle);
  task.key_end = end;
  task.by_row = true;
  pieces.push_back({task, cost_of(task)});
}

bool is_tree(const Attention& call, int64_t n) {
  if (call.path_start == nullptr || call.row_start[n] == call.row_start[n + 1]) return false;
  return key_places(call, call.row_start[n]).path != nullptr;
}

int64_t slots_len(const Attention& call, const AttentionMerge& merge) {
  return merge.slots_n * (merge.row_end - merge.row_begin) * call.heads * slot_len(call.dim());
}

// Cuts a piece into tasks of at most so many heads and segments.
void cut(AttentionTask task, int64_t heads, int64_t run, Tasks& made) {
  const int64_t key_begin = task.key_begin, key_end = task.key_end, slot = task.slot;
  const int64_t head_end = task.head_end;
  for (int64_t at = key_begin; at < key_end; at += run * key_segment) {
    task.key_begin = at;
    task.key_end = std::min(at + run * key_segment, key_end);
    task.slot = slot + (at - key_begin) / key_segment;
    for (int64_t head = 0; head < head_end; head += heads) {
      task.head_begin = head;
      task.head_end = std::min(head + heads, head_end);
      made.tasks.push_back(task);
    }
  }
}

// A decoding sequence is one task where there are enough of them, so that the rows of its pages are
// read once and in order; where there are few, heads and segments are shared out.
void add_tasks(Piece piece, int64_t share, AttentionMerge* merge, Tasks& made) {
  AttentionTask& task = piece.task;
  const Attention& call = *task.call;
  const int64_t kv_heads = task.head_end, n = segments(task);
  const int64_t lanes = (task.row_end - task.row_begin) * task.group();
  const bool few = lanes <= 16 || task.by_row, small = piece.cost * kv_heads * 2 <= share;
  if (merge == nullptr && n > 1 && !small && lanes <= lanes_apart) {
    AttentionMerge own{&call, task.row_begin, task.row_end, n, nullptr};
    if (slots_len(call, own) * 4 <= slot_bytes_max) {
      made.merges.push_back(own);
      merge = &made.merges.back();
    }
  }
  task.merge = merge;
  if (merge == nullptr || small) {
    cut(task, few && small ? kv_heads : 1, n, made);
    return;
  }
  const int64_t heads = few && 4 * piece.cost * kv_heads <= n * share ? kv_heads : 1;
  const int64_t runs = ceil_div(4 * piece.cost * heads, std::max<int64_t>(1, share));
  cut(task, heads, std::max<int64_t>(1, n / runs), made);
}

// The pieces of a tree have their slots in one merge; a prefix that is not cut takes one.
void add_tree_tasks(Piece* piece, int64_t pieces, int64_t share, Tasks& made) {
  if (pieces == 1) {
    add_tasks(piece[0], share, nullptr, made);
    return;
  }
  AttentionTask &prefix = piece[0].task, &rest = piece[1].task;
  AttentionMerge merge{prefix.call, prefix.row_begin, prefix.row_end, 0, nullptr};
  merge.slots_n = segments(prefix) + segments(rest);
  prefix.folds = piece[0].cost * 2 <= share || slots_len(*prefix.call, merge) * 4 > slot_bytes_max;
  if (prefix.folds) merge.slots_n = 1 + segments(rest);
  rest.slot = merge.slots_n - segments(rest);
  made.merges.push_back(merge);
  if (prefix.folds) {
    prefix.merge = &made.merges.back();
    cut(prefix, prefix.head_end, segments(prefix), made);
  } else {
    add_tasks(piece[0], share, &made.merges.back(), made);
  }
  rest.merge = &made.merges.back();
  cut(rest, 1, segments(rest), made);
}

void open_slots(const Attention& call, Tasks& made) {
  int64_t len = 0;
  for (const AttentionMerge& merge : made.merges) len += slots_len(call, merge);
  if (len == 0) return;
  float* at = static_cast<float*>(thread_scratch(scratch_slots, len * 4));
  for (AttentionMerge& merge : made.merges) {
    merge.slots = at;
    const int64_t own = slots_len(call, merge), step = slot_len(call.dim());
    for (int64_t i = slot_max(call.dim()); i < own; i += step) at[i] = no_max;
    at += own;
  }
}

int64_t whole_cost(const AttentionTask& task) {
  return cost_of(task) * (task.head_end - task.head_begin);
}

// The longest first, so that the last to end is short.
bool before(const AttentionTask& a, const AttentionTask& b) {
  return std::make_tuple(-whole_cost(a), a.sequence, a.row_begin, a.key_begin, a.head_begin) <
         std::make_tuple(-whole_cost(b), b.sequence, b.row_begin, b.key_begin, b.head_begin);
}

// Tasks that a thread takes at once, so that it can fetch the keys of the next while it works: half of
// a thread's share of what is left.
void bundle(int64_t threads, Tasks& made) {
  int64_t left = 0, own = 0;
  for (const AttentionTask& task : made.tasks) left += whole_cost(task);
  const int64_t n = static_cast<int64_t>(made.tasks.size());
  made.ends.clear();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t next = i + 1 < n ? whole_cost(made.tasks[static_cast<size_t>(i + 1)]) : 0;
    own += whole_cost(made.tasks[static_cast<size_t>(i)]);
    if (i + 1 < n && (threads == 1 || (own + next) * 2 * threads <= left)) continue;
    made.ends.push_back(i + 1);
    left -= own;
    own = 0;
  }
}

void split(const Attention& call, int threads, Tasks& made) {
  made.pieces.clear();
  made.tasks.clear();
  made.merges.clear();
  for (int64_t n = 0; n < call.sequences; ++n) {
    is_tree(call, n) ? add_tree(call, n, made.pieces) : add_rows(call, n, threads, made.pieces);
  }
  int64_t total = 0;
  for (const Piece& piece : made.pieces) total += piece.cost * call.k_shape.heads;
  const int64_t share = threads == 1 ? INT64_MAX / 16 : total / threads;
  made.merges.reserve(made.pieces.size());
  for (size_t i = 0; i < made.pieces.size(); ++i) {
    Piece* piece = &made.pieces[i];
    const int64_t n = piece->task.sequence;
    if (!is_tree(call, n)) {
      add_tasks(*piece, share, nullptr, made);
      continue;
    }
    const bool two = i + 1 < made.pieces.size() && piece[1].task.sequence == n;
    add_tree_tasks(piece, two ? 2 : 1, share, made);
    if (two) ++i;
  }
  open_slots(call, made);
  std::sort(made.tasks.begin(), made.tasks.end(), before);
  bundle(threads, made);
}

}  // namespace

void attention(Team& team, const Attention& call) {
  static thread_local Tasks made;
  split(call, team.threads(), made);
  auto attend = kernels().attention;
  auto merge = kernels().attention_merge;
#if defined(__x86_64__)
  if (level() == Level::amx && amx_attention_fits(call)) {
    attend = amx_attention;
    merge = amx_attention_merge;
  }
#endif
  const Tasks& all = made;  // the caller's, on every thread
  team.run(static_cast<int64_t>(all.ends.size()), [&](int64_t i) {
    const int64_t begin = i == 0 ? 0 : all.ends[static_cast<size_t>(i - 1)];
    attend(all.tasks.data() + begin, all.ends[static_cast<size_t>(i)] - begin);
  });
  team.run(static_cast<int64_t>(all.merges.size()),
           [&](int64_t i) { merge(all.merges[static_cast<size_t>(i)]); });
}

}  // namespace aserve
