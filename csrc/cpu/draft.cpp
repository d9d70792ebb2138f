#include "aserve/draft.h"

#include <algorithm>
#include <vector>

#include "aserve/kv.h"
#include "aserve/rows.h"
#include "aserve/tree.h"
#include "block_parts.h"
#include "share.h"

namespace aserve {

namespace {

// What the attention of a draft head takes.
const float* entering_rows(Team& team, Workspace& space, const DraftLayer& layer, int64_t rows,
                           const float* embedded, const float* hidden) {
  if (layer.norm_embedding == nullptr) return hidden;
  const int64_t n = layer.mlp.hidden();
  float* both = space.take(Workspace::entering, rows * 2 * n);
  share_rows(team, rows, 2 * n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto norm = [&](const float* x, const float* weight, float* y) {
        rms_norm(team, {x + row * n, n, nullptr, nullptr, weight, y, 1, 1, n, layer.eps});
      };
      norm(embedded, layer.norm_embedding, both + row * 2 * n);
      norm(hidden, layer.norm_hidden, both + row * 2 * n + n);
    }
  });
  return both;
}

// The first n columns of some rows.
float* picked_rows(const Ends& ends, const float* x, int64_t stride, int64_t n, float* y) {
  for (int64_t i = 0; i < ends.n; ++i) {
    std::copy_n(x + ends.rows[i] * stride, n, y + i * n);
  }
  return y;
}

void embed_rows(Team& team, const Embedding& table, const int64_t* ids, int64_t rows, float* out) {
  if (table.packed == nullptr) {
    embed(table.type, table.table, table.dim, ids, rows, out);
    return;
  }
  share_rows(team, rows, table.dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unpack_row(*table.packed, ids[i], out + i * table.dim);
  });
}

// The levels of n trees, one after the other.
class Growth {
 public:
  Growth(Team& team, Workspace& space, const DraftLayer& layer, const Weight* fc,
         const Embedding& table, const KvPages& pages, const DraftRoots& roots,
         const DraftSize& size)
      : team_(team), space_(space), layer_(layer), fc_(fc), table_(table), pages_(pages),
        roots_(roots), size_(size), rows_(roots.n * size.width), hidden_(layer.mlp.hidden()),
        capacity_(size.candidates()) {
    const int64_t most = std::max(size.width, roots.seeds == nullptr ? 0 : roots.most);
    scores_.resize(roots.n * capacity_);
    tokens_.resize(roots.n * capacity_);
    parents_.resize(roots.n * capacity_);
    likely_.resize(rows_ * most);
    likely_tokens_.resize(rows_ * most);
    for (auto* level : {&beam_, &next_}) level->resize(rows_);
    beam_tokens_.resize(rows_);
    beam_rows_.resize(rows_);
    // Hidden rows of a level and of those above it, embeddings, fc's input, logits.
    float* at = space.take(Workspace::of_drafts, rows_ * (5 * hidden_ + layer.head->n));
    for (float** part : {&out_, &above_, &embedded_}) {
      *part = at;
      at += rows_ * hidden_;
    }
    both_ = at;
    logits_ = at + 2 * rows_ * hidden_;
  }

  void run(int32_t* tokens, int32_t* parents) {
    make_room();
    spread(roots_.hidden, roots_.logits, roots_.n, 1);
    for (int64_t level = 1; level < size_.levels(); ++level) {
      descend(level);
      spread(out_, logits_, rows_, level + 1);
    }
    std::vector<int32_t> starts(roots_.n + 1);
    for (int64_t i = 0; i <= roots_.n; ++i) starts[i] = static_cast<int32_t>(i * size_.nodes());
    std::vector<float> scores(roots_.n * size_.nodes());
    select(team_, {pool(), starts.data(), tokens, parents, scores.data(), count_});
  }

 private:
  TreePool pool() {
    return {scores_.data(), tokens_.data(), parents_.data(), capacity_, roots_.n};
  }

  // Tables that go on in the pages of their own, and a copy of what they have before that there.
  void make_room() {
    const int64_t size = pages_.k_shape.page_size, n = roots_.n;
    pages_max_ = roots_.pages_max - 1 + roots_.pages_each;
    page_table_.assign(n * pages_max_, 0);
    std::vector<int32_t> from, to;
    for (int64_t i = 0; i < n; ++i) {
      int32_t* row = page_table_.data() + i * pages_max_;
      std::copy_n(roots_.page_table + i * roots_.pages_max, roots_.pages_max, row);
      const int64_t whole = roots_.lengths[i] / size, left = roots_.lengths[i] % size;
      const int64_t own = roots_.first_page + i * roots_.pages_each;
      for (int64_t j = 0; j < left; ++j) {
        from.push_back(static_cast<int32_t>(row[whole] * size + j));
        to.push_back(static_cast<int32_t>(own * size + j));
      }
      for (int64_t j = 0; j < roots_.pages_each; ++j) row[whole + j] = static_cast<int32_t>(own + j);
      slots_.push_back(static_cast<int32_t>(own * size + left));
    }
    const KvPool pools[] = {{pages_.type, pages_.k, pages_.k_shape},
                            {pages_.type, pages_.v, pages_.v_shape}};
    kv_move(team_, pools, 2, from.data(), to.data(), static_cast<int64_t>(from.size()));
  }

  // What may follow each of some rows becomes candidates, and the best of them the next beam.
  void spread(const float* hidden, const float* logits, int64_t rows, int64_t level) {
    const int64_t width = size_.width, vocab = layer_.head->n;
    const bool noisy = roots_.seeds != nullptr;
    const int64_t most = noisy ? roots_.most : width;
    top_tokens(team_, {logits, likely_.data(), likely_tokens_.data(), vocab, rows, vocab, most});
    if (roots_.ids != nullptr) {
      for (int64_t i = 0; i < rows * most; ++i) likely_tokens_[i] = roots_.ids[likely_tokens_[i]];
    }
    const float* logprobs = likely_.data();
    const int32_t* tokens = likely_tokens_.data();
    if (noisy) {
      make_noise(rows, level - 1);
      under_noise(team_, {logprobs, tokens, seeds_.data(), positions_.data(), temperatures_.data(),
                          drawn_.data(), drawn_tokens_.data(), rows, most, width});
      logprobs = drawn_.data();
      tokens = drawn_tokens_.data();
    }
    const int64_t beams = rows / roots_.n;
    expand(team_, {pool(), logprobs, tokens, level == 1 ? nullptr : beam_.data(), next_.data(),
                   beam_tokens_.data(), beam_rows_.data(), count_, beams, width, width});
    count_ += beams * width;
    std::swap(beam_, next_);
    hidden_above_ = hidden;
  }

  void make_noise(int64_t rows, int64_t below) {
    const int64_t beams = rows / roots_.n;
    seeds_.resize(rows);
    positions_.resize(rows);
    temperatures_.resize(rows);
    drawn_.resize(rows * size_.width);
    drawn_tokens_.resize(rows * size_.width);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = row / beams;
      seeds_[row] = roots_.seeds[i];
      positions_[row] = roots_.positions[i] + static_cast<int32_t>(below);
      temperatures_[row] = roots_.temperatures[i];
    }
  }

  // The head over the nodes of the beam, each of which continues the row it is a child of.
  void descend(int64_t level) {
    std::vector<int64_t> ids(beam_tokens_.begin(), beam_tokens_.end());
    for (int64_t row = 0; row < rows_; ++row) {
      std::copy_n(hidden_above_ + beam_rows_[row] * hidden_, hidden_, above_ + row * hidden_);
    }
    embed_rows(team_, table_, ids.data(), rows_, embedded_);
    const float* entering = above_;
    if (fc_ != nullptr) {
      for (int64_t row = 0; row < rows_; ++row) {
        std::copy_n(embedded_ + row * hidden_, hidden_, both_ + row * 2 * hidden_);
        std::copy_n(above_ + row * hidden_, hidden_, both_ + row * 2 * hidden_ + hidden_);
      }
      linear(team_, *fc_, both_, rows_, embedded_);
      entering = embedded_;
    }
    draft_layer(team_, space_, layer_, step_of(level), pages_, embedded_, entering, nullptr, out_,
                logits_);
  }

  BlockStep step_of(int64_t level) {
    const int64_t width = size_.width, n = roots_.n, first = (level - 1) * width;
    row_start_.clear();
    kv_len_.clear();
    at_.clear();
    places_.clear();
    std::vector<int32_t> paths;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t i = row / width;
      const auto place = static_cast<int32_t>(first + row % width);
      places_.push_back(slots_[i] + place);
      at_.push_back(roots_.lengths[i] + static_cast<int32_t>(level - 1));
      if (width == 1) continue;  // all before a node are on its path
      const int32_t* above = paths_.data() + beam_rows_[row] * (level - 1);
      paths.insert(paths.end(), above, above + level - 1);
      paths.push_back(place);
    }
    paths_ = paths;
    path_start_.clear();
    for (int64_t row = 0; row <= rows_; ++row) {
      path_start_.push_back(static_cast<int32_t>(row * level));
    }
    for (int64_t i = 0; i <= n; ++i) row_start_.push_back(static_cast<int32_t>(i * width));
    for (int64_t i = 0; i < n; ++i) {
      kv_len_.push_back(roots_.lengths[i] + static_cast<int32_t>(first + width));
    }
    BlockStep step{};
    step.rows = rows_;
    step.slots = places_.data();
    step.cos_sin = roots_.cos_sin;
    step.rot = roots_.rot;
    Attention& attend = step.attend;
    attend.sequences = n;
    attend.row_start = row_start_.data();
    attend.positions = at_.data();
    attend.kv_len = kv_len_.data();
    attend.page_table = page_table_.data();
    attend.pages_max = pages_max_;
    if (width > 1) {
      attend.path_start = path_start_.data();
      attend.paths = paths_.data();
      attend.paths_len = static_cast<int64_t>(paths_.size());
    }
    return step;
  }

  Team& team_;
  Workspace& space_;
  const DraftLayer& layer_;
  const Weight* fc_;
  const Embedding& table_;
  const KvPages& pages_;
  const DraftRoots& roots_;
  const DraftSize& size_;
  const int64_t rows_, hidden_, capacity_;
  int64_t count_ = 0, pages_max_ = 0;
  const float* hidden_above_ = nullptr;
  float *out_, *above_, *embedded_, *both_, *logits_;
  std::vector<float> scores_, likely_, drawn_, temperatures_;
  std::vector<int32_t> tokens_, parents_, likely_tokens_, drawn_tokens_, beam_, next_, beam_tokens_,
      beam_rows_, page_table_, slots_, positions_, at_, places_, paths_, path_start_, row_start_,
      kv_len_;
  std::vector<uint64_t> seeds_;
};

}  // namespace

void draft_layer(Team& team, Workspace& space, const DraftLayer& layer, const BlockStep& step,
                 const KvPages& pages, const float* embedded, const float* hidden, const Ends* ends,
                 float* out, float* logits) {
  const Team::Busy busy(team);
  const AttentionBlock& b = layer.attention;
  const int64_t n = ends == nullptr ? step.rows : ends->n, columns = layer.mlp.hidden();
  const int64_t q_len = b.heads * b.dim;
  const float* entering = entering_rows(team, space, layer, step.rows, embedded, hidden);
  const float* qkv = project_rows(team, space, b, step, pages, entering);
  if (n == 0) return;

  float* attended = space.take(Workspace::attended, n * q_len);
  Attention call = attention_call(b, step, pages, qkv, attended);
  if (ends != nullptr) {
    BlockStep last = step;
    last.attend = ends->attend;
    float* q = space.take(Workspace::picked, n * (q_len + columns));
    call = attention_call(b, last, pages, picked_rows(*ends, qkv, b.qkv->n, q_len, q), attended);
    call.q_stride = q_len;
    hidden = picked_rows(*ends, hidden, columns, columns, q + n * q_len);
  }
  attention(team, call);
  float* added = space.take(Workspace::added, n * columns);
  float* total = space.take(Workspace::total, n * columns);
  linear(team, *b.out, attended, n, added);
  mlp_block(team, space, layer.mlp, n, {hidden, added, total}, Sums::whole, added);
  const float* last = out;
  if (layer.norm == nullptr) {
    add(team, total, added, out, n * columns);
  } else {
    float* normed = space.take(Workspace::normed, n * columns);
    rms_norm(team, {added, columns, total, out, layer.norm, normed, n, 1, columns, layer.eps});
    last = normed;
  }
  linear(team, *layer.head, last, n, logits);
}

void grow_drafts(Team& team, Workspace& space, const DraftLayer& layer, const Weight* fc,
                 const Embedding& table, const KvPages& pages, const DraftRoots& roots,
                 const DraftSize& size, int32_t* tokens, int32_t* parents) {
  const Team::Busy busy(team);
  Growth(team, space, layer, fc, table, pages, roots, size).run(tokens, parents);
}

}  // namespace aserve
