#include "aserve/draft.h"

#include <algorithm>
#include <memory>

#include "blocks.h"
#include "packed.h"

namespace aserve {
namespace {

struct DraftHandle {
  DraftLayer layer;
  Floats norm_embedding, norm_hidden, q_norm, k_norm, norm_mlp, norm;
};

// weights: (qkv, out, gate_up, down, head). norms: (of the embedding, of the hidden row, of q, of k,
// before the MLP, before the head), of which all but the fifth may be 0. sizes as in make_attention.
std::unique_ptr<DraftHandle> make_draft(const py::tuple& weights, const py::tuple& norms,
                                        const py::tuple& sizes, float eps, float scale) {
  const auto weight = [&](int i) { return &weights[i].cast<const Packed&>().weight; };
  const Weight *qkv = weight(0), *out = weight(1), *gate_up = weight(2), *down = weight(3);
  const int64_t heads = sizes[0].cast<int64_t>(), kv_heads = sizes[1].cast<int64_t>();
  const int64_t dim = sizes[2].cast<int64_t>(), hidden = down->n;
  require(heads > 0 && kv_heads > 0 && dim > 0, "a block without heads");
  require(heads % kv_heads == 0, "heads is not a multiple of kv_heads");
  require(qkv->n == (heads + 2 * kv_heads) * dim, "the projection does not fit the heads");
  require(out->k == heads * dim, "the output projection does not fit the heads");
  require(gate_up->n == 2 * down->k, "gate and up do not fit down");
  require(out->n == hidden && gate_up->k == hidden && weight(4)->k == hidden,
          "attention, MLP and head differ in columns");
  require(scale > 0.0f, "scale is not positive");
  auto made = std::make_unique<DraftHandle>();
  const auto norm = [&](int i, int64_t n) { return copied(norms[i].cast<Address>(), n); };
  made->norm_embedding = norm(0, hidden);
  made->norm_hidden = norm(1, hidden);
  made->q_norm = norm(2, dim);
  made->k_norm = norm(3, dim);
  made->norm_mlp = norm(4, hidden);
  made->norm = norm(5, hidden);
  require(made->norm_embedding.empty() == made->norm_hidden.empty(),
          "embedding and hidden row are normed both or neither");
  require(made->q_norm.empty() == made->k_norm.empty(), "q and k are normed both or neither");
  require(!made->norm_mlp.empty(), "a block without a norm");
  require(qkv->k == (made->norm_hidden.empty() ? hidden : 2 * hidden),
          "the projection does not fit the rows");
  made->layer = {or_null(made->norm_embedding),
                 or_null(made->norm_hidden),
                 {nullptr, or_null(made->q_norm), or_null(made->k_norm), qkv, out, heads, kv_heads,
                  dim, eps, scale},
                 {made->norm_mlp.data(), gate_up, down, eps},
                 or_null(made->norm),
                 weight(4),
                 eps};
  return made;
}

// rows: (embedded or 0, hidden); ends: None, or (rows, what a step says of them); made: (out, logits).
void run_draft(Team& team, SharedSpace& shared, const DraftHandle& handle, const py::tuple& step_of,
               const py::tuple& pool, const py::tuple& rows, const py::object& ends_of,
               const py::tuple& made) {
  const BlockStep step = block_step(step_of);
  const AttentionBlock& block = handle.layer.attention;
  check_step(block, step, pool);
  Ends ends{};
  const bool some = !ends_of.is_none();
  if (some) {
    const auto given = ends_of.cast<py::tuple>();
    BlockStep last = block_step(given[1].cast<py::tuple>());
    ends = {last.rows, at<const int64_t>(given[0].cast<Address>()), last.attend};
    check_step(block, last, pool);
    for (int64_t i = 0; i < ends.n; ++i) {
      require(ends.rows[i] >= 0 && ends.rows[i] < step.rows, "an end that is no row of the step");
    }
  }
  const KvPages pages = kv_pages(pool);
  const auto* embedded = at<const float>(rows[0].cast<Address>());
  const auto* hidden = at<const float>(rows[1].cast<Address>());
  require(embedded != nullptr || step.rows == 0 || handle.layer.norm_embedding == nullptr,
          "no embeddings");
  auto* out = at<float>(made[0].cast<Address>());
  auto* logits = at<float>(made[1].cast<Address>());
  in_turn(shared, [&](Workspace& space) {
    draft_layer(team, space, handle.layer, step, pages, embedded, hidden, some ? &ends : nullptr,
                out, logits);
  });
}

// (packed, or None; is_bf16, address, rows, columns)
Embedding embedding_of(const py::tuple& table) {
  if (!table[0].is_none()) {
    const Weight& packed = table[0].cast<const Packed&>().weight;
    return {&packed, Type::f32, nullptr, packed.n, packed.k};
  }
  return {nullptr, table[1].cast<bool>() ? Type::bf16 : Type::f32,
          at<const void>(table[2].cast<Address>()), table[3].cast<int64_t>(),
          table[4].cast<int64_t>()};
}

// ends: (n, hidden, logits, page_table, pages_max, lengths); own: (first_page, pages_each);
// noise: None, or (seeds, positions, temperatures, most).
DraftRoots roots_of(const py::tuple& ends, const py::tuple& own, const py::object& noise_of) {
  DraftRoots made{};
  made.n = ends[0].cast<int64_t>();
  made.hidden = at<const float>(ends[1].cast<Address>());
  made.logits = at<const float>(ends[2].cast<Address>());
  made.page_table = at<const int32_t>(ends[3].cast<Address>());
  made.pages_max = ends[4].cast<int64_t>();
  made.lengths = at<const int32_t>(ends[5].cast<Address>());
  made.first_page = own[0].cast<int64_t>();
  made.pages_each = own[1].cast<int64_t>();
  if (!noise_of.is_none()) {
    const auto noise = noise_of.cast<py::tuple>();
    made.seeds = at<const uint64_t>(noise[0].cast<Address>());
    made.positions = at<const int32_t>(noise[1].cast<Address>());
    made.temperatures = at<const float>(noise[2].cast<Address>());
    made.most = noise[3].cast<int64_t>();
  }
  return made;
}

void check_roots(const DraftRoots& roots, const DraftSize& size, const PageShape& pages,
                 int64_t positions, int64_t vocab) {
  require(size.depth >= 1 && size.width >= 1 && size.tokens >= 1, "a draft of nothing");
  require(size.width <= vocab, "more children than tokens");
  require(roots.seeds == nullptr || (roots.most >= size.width && roots.most <= vocab),
          "noise chooses among fewer than are wanted, or more than there are");
  require_range(roots.page_table, roots.n * roots.pages_max, pages.pages, "page");
  require(roots.first_page >= 0 && roots.pages_each >= 1 &&
              roots.first_page + roots.n * roots.pages_each <= pages.pages,
          "more trees than there are pages for");
  for (int64_t i = 0; i < roots.n; ++i) {
    const int64_t length = roots.lengths[i];
    require(length >= 1 && length / pages.page_size < roots.pages_max,
            "a sequence is longer than its pages");
    require(length % pages.page_size + size.placed() <= roots.pages_each * pages.page_size,
            "a tree is larger than its pages");
    require(length + size.levels() <= positions, "a tree is deeper than there are positions");
  }
}

// table: as embedding_of takes it; fc and ids may be None and 0; rope: (cos_sin, positions, rot);
// size: (depth, width, tokens); made: (tokens, parents).
void run_grow(Team& team, SharedSpace& shared, const DraftHandle& handle, const py::tuple& around,
              const py::tuple& pool, const py::tuple& given, const py::tuple& size_of,
              const py::tuple& made) {
  const DraftLayer& layer = handle.layer;
  const Embedding table = embedding_of(around[0].cast<py::tuple>());
  const Weight* fc = around[1].is_none() ? nullptr : &around[1].cast<const Packed&>().weight;
  const int64_t hidden = layer.mlp.hidden(), vocab = layer.head->n;
  require(table.dim == hidden, "the embedding does not fit the head");
  require((fc == nullptr) == (layer.norm_embedding != nullptr), "fc or norms, one of them");
  require(fc == nullptr || (fc->n == hidden && fc->k == 2 * hidden), "fc does not fit the head");
  DraftRoots roots =
      roots_of(given[0].cast<py::tuple>(), given[1].cast<py::tuple>(), given[2]);
  roots.ids = at<const int32_t>(around[2].cast<Address>());
  if (roots.ids == nullptr) {
    require(vocab <= table.rows, "the embedding has fewer rows than there are tokens");
  } else {
    require_range(roots.ids, vocab, table.rows, "token");
  }
  const auto rope = around[3].cast<py::tuple>();
  roots.cos_sin = at<const float>(rope[0].cast<Address>());
  roots.rot = rope[2].cast<int64_t>();
  const DraftSize size{size_of[0].cast<int64_t>(), size_of[1].cast<int64_t>(),
                       size_of[2].cast<int64_t>()};
  const KvPages pages = kv_pages(pool);
  BlockStep step{};
  step.rot = roots.rot;
  require(roots.rot > 0 && roots.rot % 2 == 0, "rot is not an even number");
  require_fit(layer.attention, step, pages);
  check_roots(roots, size, pages.k_shape, rope[1].cast<int64_t>(), vocab);
  auto* tokens = at<int32_t>(made[0].cast<Address>());
  auto* parents = at<int32_t>(made[1].cast<Address>());
  in_turn(shared, [&](Workspace& space) {
    grow_drafts(team, space, layer, fc, table, pages, roots, size, tokens, parents);
  });
}

}  // namespace

void bind_draft(py::module_& module) {
  py::class_<DraftHandle>(module, "DraftLayer").def(py::init(&make_draft), py::keep_alive<1, 2>());
  module.def("draft_layer", &run_draft);
  module.def("draft_grow", &run_grow);
}

}  // namespace aserve
