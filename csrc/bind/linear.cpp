#include "aserve/linear.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "bind.h"

namespace aserve {
namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// A weight with the memory it lives in.
struct Packed {
  Weight weight;
  std::unique_ptr<void, Free> memory;
  std::vector<float> bias;
  int64_t nbytes() const {
    return weight.packed_bytes() + static_cast<int64_t>(bias.size() * sizeof(float));
  }
};

std::unique_ptr<Packed> pack(Team& team, bool is_bf16, Address source, int64_t n, int64_t k,
                             Address bias, int64_t row_blocks) {
  require(n > 0 && k > 0, "a weight has at least one row and one column");
  require(row_blocks > 0 && k % row_blocks == 0, "K does not split into equal row blocks");
  auto packed = std::make_unique<Packed>();
  packed->weight = weight_shape(is_bf16 ? Type::bf16 : Type::f32, n, k, row_blocks);
  const int64_t bytes = (packed->weight.packed_bytes() + 4095) / 4096 * 4096;
  packed->memory.reset(std::aligned_alloc(4096, static_cast<size_t>(bytes)));
  if (!packed->memory) throw std::bad_alloc();
  packed->weight.packed = packed->memory.get();
  if (bias != 0) {
    packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    packed->weight.bias = packed->bias.data();
  }
  py::gil_scoped_release release;
  pack_weight(team, packed->weight, at<void>(source), packed->memory.get());
  return packed;
}

void require_columns(const Weight& w, int64_t k) {
  if (k != w.k) {
    throw py::value_error("x has " + std::to_string(k) + " columns, the weight " +
                          std::to_string(w.k));
  }
}

void run_linear(Team& team, const Packed& packed, Address x, int64_t m, int64_t k, Address y) {
  const Weight& w = packed.weight;
  require_columns(w, k);
  unlocked(m * w.n * w.k / 16,
           [&] { linear(team, w, at<const float>(x), m, at<float>(y)); });
}

void run_linear_parts(Team& team, const Packed& packed, Address x, int64_t m, int64_t k,
                      Address parts) {
  const Weight& w = packed.weight;
  require_columns(w, k);
  unlocked(m * w.n * w.k / 16,
           [&] { linear_parts(team, w, at<const float>(x), m, at<float>(parts)); });
}

void run_embed(const Packed& packed, Address ids, int64_t rows, Address out) {
  const int64_t* id = at<const int64_t>(ids);
  for (int64_t i = 0; i < rows; ++i) {
    require(id[i] >= 0 && id[i] < packed.weight.n, "a token id is outside the table");
  }
  for (int64_t i = 0; i < rows; ++i) {
    unpack_row(packed.weight, id[i], at<float>(out) + i * packed.weight.k);
  }
}

}  // namespace

void bind_linear(py::module_& module) {
  py::class_<Packed>(module, "Packed")
      .def_property_readonly("n", [](const Packed& p) { return p.weight.n; })
      .def_property_readonly("k", [](const Packed& p) { return p.weight.k; })
      .def_property_readonly("row_blocks", [](const Packed& p) { return p.weight.row_blocks; })
      .def_property_readonly("nbytes", &Packed::nbytes);
  module.def("pack", &pack);
  module.def("linear", &run_linear);
  module.def("linear_parts", &run_linear_parts);
  module.def("embed_packed", &run_embed);
}

}  // namespace aserve
