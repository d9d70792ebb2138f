#include "aserve/block.h"

#include <memory>
#include <mutex>
#include <vector>

#include "attend.h"
#include "bind.h"
#include "packed.h"

namespace aserve {
namespace {

using Floats = std::vector<float>;

// A workspace and whose turn it is with it.
struct SharedSpace {
  Workspace space;
  std::mutex turns;
};

// Blocks as Python holds them: their vectors are copied, their weights kept alive.
struct AttentionHandle {
  AttentionBlock block;
  Floats norm, q_norm, k_norm;
};

struct MlpHandle {
  MlpBlock block;
  Floats norm;
};

struct StackHandle {
  std::vector<LayerBlocks> layers;
  std::vector<py::object> kept;
  Floats norm;
  float eps;

  Stack stack() const {
    return {layers.data(), static_cast<int64_t>(layers.size()), norm.empty() ? nullptr : norm.data(),
            eps};
  }
};

struct DraftHandle {
  DraftLayer layer;
  Floats norm_embedding, norm_hidden, q_norm, k_norm, norm_mlp, norm;
};

Floats copied(Address address, int64_t n) {
  return address == 0 ? Floats() : Floats(at<const float>(address), at<const float>(address) + n);
}

const float* or_null(const Floats& x) { return x.empty() ? nullptr : x.data(); }

// norms: (of the rows, of q, of k); the latter two may be 0. sizes: (heads, kv_heads, dim).
std::unique_ptr<AttentionHandle> make_attention(const Packed& qkv, const Packed& out,
                                                const py::tuple& norms, const py::tuple& sizes,
                                                float eps, float scale) {
  const int64_t heads = sizes[0].cast<int64_t>(), kv_heads = sizes[1].cast<int64_t>();
  const int64_t dim = sizes[2].cast<int64_t>();
  require(heads > 0 && kv_heads > 0 && dim > 0, "a block without heads");
  require(heads % kv_heads == 0, "heads is not a multiple of kv_heads");
  require(qkv.weight.n == (heads + 2 * kv_heads) * dim, "the projection does not fit the heads");
  require(out.weight.k == heads * dim, "the output projection does not fit the heads");
  require(out.weight.n == qkv.weight.k, "a block gives as many columns as it takes");
  require(scale > 0.0f, "scale is not positive");
  auto made = std::make_unique<AttentionHandle>();
  made->norm = copied(norms[0].cast<Address>(), qkv.weight.k);
  made->q_norm = copied(norms[1].cast<Address>(), dim);
  made->k_norm = copied(norms[2].cast<Address>(), dim);
  require(!made->norm.empty(), "a block without a norm");
  require(made->q_norm.empty() == made->k_norm.empty(), "q and k are normed both or neither");
  made->block = {made->norm.data(), or_null(made->q_norm), or_null(made->k_norm),
                 &qkv.weight,       &out.weight,           heads,
                 kv_heads,          dim,                   eps,
                 scale};
  return made;
}

std::unique_ptr<MlpHandle> make_mlp(const Packed& gate_up, const Packed& down, Address norm,
                                    float eps) {
  require(gate_up.weight.n == 2 * down.weight.k, "gate and up do not fit down");
  require(gate_up.weight.k == down.weight.n, "a block gives as many columns as it takes");
  auto made = std::make_unique<MlpHandle>();
  made->norm = copied(norm, gate_up.weight.k);
  made->block = {or_null(made->norm), &gate_up.weight, &down.weight, eps};
  return made;
}

// layers: a list of (attention, mlp); norm may be 0.
std::unique_ptr<StackHandle> make_stack(const py::list& layers, Address norm, float eps) {
  require(!layers.empty(), "a stack of no layers");
  auto made = std::make_unique<StackHandle>();
  for (const auto& item : layers) {
    const auto pair = item.cast<py::tuple>();
    const LayerBlocks layer{pair[0].cast<const AttentionHandle&>().block,
                            pair[1].cast<const MlpHandle&>().block};
    const int64_t hidden = layer.attention.hidden();
    require(layer.mlp.hidden() == hidden, "attention and MLP differ in columns");
    require(layer.mlp.norm != nullptr, "a block without a norm");
    made->layers.push_back(layer);
    made->kept.push_back(pair);
    require(made->layers[0].attention.hidden() == hidden, "layers differ in columns");
  }
  made->norm = copied(norm, made->layers[0].attention.hidden());
  made->eps = eps;
  return made;
}

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

KvPages kv_pages(const py::tuple& pool) {
  return {static_cast<Type>(pool[0].cast<int>()), at<void>(pool[1].cast<Address>()),
          at<void>(pool[2].cast<Address>()), page_shape(pool[3].cast<py::tuple>()),
          page_shape(pool[4].cast<py::tuple>())};
}

// step: (rows, slots, attend as in attend.h, cos_sin, positions, rot).
BlockStep block_step(const py::tuple& step) {
  BlockStep made{};
  made.rows = step[0].cast<int64_t>();
  made.slots = at<const int32_t>(step[1].cast<Address>());
  set_attend(&made.attend, step[2].cast<py::tuple>());
  made.cos_sin = at<const float>(step[3].cast<Address>());
  made.rot = step[5].cast<int64_t>();
  require(made.rot > 0 && made.rot % 2 == 0, "rot is not an even number");
  require_range(made.attend.positions, made.rows, step[4].cast<int64_t>(), "position");
  return made;
}

void require_fit(const AttentionBlock& block, const BlockStep& step, const KvPages& pages) {
  require(step.rot <= block.dim, "rot is more than head_dim");
  for (const PageShape* shape : {&pages.k_shape, &pages.v_shape}) {
    require(shape->heads == block.kv_heads && values_of(pages.type, shape->dim) == block.dim,
            "pages do not fit the heads of the block");
  }
}

// Whatever a block could read or write out of bounds.
void check_step(const AttentionBlock& block, const BlockStep& step, const py::tuple& pool) {
  const KvPages pages = kv_pages(pool);
  require_fit(block, step, pages);
  Attention call = step.attend;
  set_pages(&call, pool);
  call.heads = block.heads;
  call.scale = block.scale;
  check(call, step.rows);
  require_range(step.slots, step.rows, pages.k_shape.pages * pages.k_shape.page_size, "slot");
}

// x, or x + added, left in total: (x, added or 0, total).
Stream stream_of(const py::tuple& stream) {
  const Stream made{at<const float>(stream[0].cast<Address>()),
                    at<const float>(stream[1].cast<Address>()),
                    at<float>(stream[2].cast<Address>())};
  require(made.added == nullptr || made.total != nullptr, "no place for the sum");
  return made;
}

template <class Work>
void in_turn(SharedSpace& shared, const Work& work) {
  py::gil_scoped_release release;
  std::lock_guard<std::mutex> turn(shared.turns);
  work(shared.space);
}

void run_attend(Team& team, SharedSpace& shared, const AttentionHandle& handle,
                const py::tuple& step_of, const py::tuple& pool, const py::tuple& stream_of_,
                Address out) {
  const BlockStep step = block_step(step_of);
  check_step(handle.block, step, pool);
  const KvPages pages = kv_pages(pool);
  const Stream stream = stream_of(stream_of_);
  in_turn(shared, [&](Workspace& space) {
    attend_block(team, space, handle.block, step, pages, stream, at<float>(out));
  });
}

void run_attention(Team& team, SharedSpace& shared, const AttentionHandle& handle,
                   const py::tuple& step_of, const py::tuple& pool, const py::tuple& stream_of_,
                   bool parts, Address y) {
  const BlockStep step = block_step(step_of);
  check_step(handle.block, step, pool);
  const KvPages pages = kv_pages(pool);
  const Stream stream = stream_of(stream_of_);
  in_turn(shared, [&](Workspace& space) {
    attention_block(team, space, handle.block, step, pages, stream,
                    parts ? Sums::parts : Sums::whole, at<float>(y));
  });
}

void run_mlp(Team& team, SharedSpace& shared, const MlpHandle& handle, int64_t rows,
             const py::tuple& stream_of_, bool parts, Address y) {
  require(handle.block.norm != nullptr, "a block without a norm");
  const Stream stream = stream_of(stream_of_);
  in_turn(shared, [&](Workspace& space) {
    mlp_block(team, space, handle.block, rows, stream, parts ? Sums::parts : Sums::whole,
              at<float>(y));
  });
}

// captures: (layer, address) pairs by ascending layers.
std::vector<Capture> captures_of(const py::tuple& captures, int64_t layers) {
  std::vector<Capture> made;
  made.reserve(captures.size());
  for (const auto& item : captures) {
    const auto pair = item.cast<py::tuple>();
    made.push_back({pair[0].cast<int64_t>(), at<float>(pair[1].cast<Address>())});
    const int64_t before = made.size() < 2 ? -1 : made[made.size() - 2].layer;
    require(made.back().layer > before && made.back().layer < layers,
            "captured layers do not ascend, or are not in the stack");
    require(made.back().rows != nullptr, "no place for what is captured");
  }
  return made;
}

// pools: one a layer, all of the same shape.
void run_layers(Team& team, SharedSpace& shared, const StackHandle& handle,
                const py::tuple& step_of, const py::tuple& pools, const py::tuple& captures_of_,
                Address x, Address out) {
  const BlockStep step = block_step(step_of);
  require(pools.size() == handle.layers.size(), "as many pools as layers");
  std::vector<KvPages> pages;
  pages.reserve(pools.size());
  check_step(handle.layers[0].attention, step, pools[0].cast<py::tuple>());
  for (const auto& pool : pools) {
    pages.push_back(kv_pages(pool.cast<py::tuple>()));
    const PageShape &first = pages[0].k_shape, &k = pages.back().k_shape, &v = pages.back().v_shape;
    require(k.pages == first.pages && k.page_size == first.page_size && v.pages == k.pages &&
                v.page_size == k.page_size,
            "layers differ in pages");
    require_fit(handle.layers[pages.size() - 1].attention, step, pages.back());
  }
  const auto captures = captures_of(captures_of_, static_cast<int64_t>(handle.layers.size()));
  in_turn(shared, [&](Workspace& space) {
    run_stack(team, space, handle.stack(), step, pages.data(),
              {captures.data(), static_cast<int64_t>(captures.size())}, at<const float>(x),
              at<float>(out));
  });
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

}  // namespace

void bind_block(py::module_& module) {
  py::class_<SharedSpace>(module, "Workspace").def(py::init<>());
  py::class_<AttentionHandle>(module, "AttentionBlock")
      .def(py::init(&make_attention), py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  py::class_<MlpHandle>(module, "MlpBlock")
      .def(py::init(&make_mlp), py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  py::class_<StackHandle>(module, "Stack").def(py::init(&make_stack));
  py::class_<DraftHandle>(module, "DraftLayer").def(py::init(&make_draft), py::keep_alive<1, 2>());
  module.def("draft_layer", &run_draft);
  module.def("attend_block", &run_attend);
  module.def("attention_block", &run_attention);
  module.def("mlp_block", &run_mlp);
  module.def("run_stack", &run_layers);
}

}  // namespace aserve
