#include "aserve/block.h"

#include <memory>
#include <vector>

#include "blocks.h"
#include "packed.h"

namespace aserve {
namespace {

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

// x, or x + added, left in total: (x, added or 0, total).
Stream stream_of(const py::tuple& stream) {
  const Stream made{at<const float>(stream[0].cast<Address>()),
                    at<const float>(stream[1].cast<Address>()),
                    at<float>(stream[2].cast<Address>())};
  require(made.added == nullptr || made.total != nullptr, "no place for the sum");
  return made;
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

}  // namespace

void bind_block(py::module_& module) {
  py::class_<SharedSpace>(module, "Workspace").def(py::init<>());
  py::class_<AttentionHandle>(module, "AttentionBlock")
      .def(py::init(&make_attention), py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  py::class_<MlpHandle>(module, "MlpBlock")
      .def(py::init(&make_mlp), py::keep_alive<1, 2>(), py::keep_alive<1, 3>());
  py::class_<StackHandle>(module, "Stack").def(py::init(&make_stack));
  module.def("attend_block", &run_attend);
  module.def("attention_block", &run_attention);
  module.def("mlp_block", &run_mlp);
  module.def("run_stack", &run_layers);
}

}  // namespace aserve
