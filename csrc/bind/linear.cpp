#include "aserve/linear.h"

#include <algorithm>
#include <cstring>

#include "aserve/memory.h"
#include "bind.h"
#include "packed.h"

namespace aserve {
namespace {

// A weight of this shape with memory for it, its bias already there.
std::unique_ptr<Packed> make(Format format, int64_t n, int64_t k, Address bias,
                             int64_t row_blocks) {
  require(n > 0 && k > 0, "a weight has at least one row and one column");
  require(row_blocks > 0 && k % row_blocks == 0, "K does not split into equal row blocks");
  auto packed = std::make_unique<Packed>();
  packed->weight = weight_shape(format, n, k, row_blocks);
  static Arena arena;
  packed->memory = arena.take(packed->weight.packed_bytes());
  packed->weight.packed = packed->memory.get();
  if (bias != 0) {
    packed->bias.assign(at<float>(bias), at<float>(bias) + n);
    packed->weight.bias = packed->bias.data();
  }
  return packed;
}

std::unique_ptr<Packed> pack(Team& team, bool is_bf16, Address source, int64_t n, int64_t k,
                             Address bias, int64_t row_blocks) {
  auto packed = make(is_bf16 ? Format::bf16 : Format::f32, n, k, bias, row_blocks);
  py::gil_scoped_release release;
  pack_weight(team, packed->weight, at<void>(source), packed->memory.get());
  return packed;
}

Format block_format(const std::string& kind) {
  if (kind == "Q8_0") return Format::q8;
  if (kind == "Q4_0") return Format::q4;
  if (kind == "Q4_1") return Format::q4m;
  throw py::value_error("blocks are Q8_0, Q4_0 or Q4_1, not " + kind);
}

// `row_bytes` is what a row of the source has.
std::unique_ptr<Packed> pack_rows(Team& team, const std::string& kind, Address source,
                                  int64_t row_bytes, int64_t n, int64_t k, Address bias,
                                  int64_t row_blocks) {
  const Format format = block_format(kind);
  require(row_blocks > 0 && k % row_blocks == 0, "K does not split into equal row blocks");
  require(k / row_blocks % 32 == 0, "a row block of a quantised weight is not a multiple of 32");
  if (row_bytes != k / 32 * block_bytes(format)) {
    throw py::value_error("rows of " + std::to_string(k) + " in " + kind + " have " +
                          std::to_string(k / 32 * block_bytes(format)) + " bytes, not " +
                          std::to_string(row_bytes));
  }
  auto packed = make(format, n, k, bias, row_blocks);
  py::gil_scoped_release release;
  pack_blocks(team, packed->weight, at<const uint8_t>(source), packed->memory.get());
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
           [&] { linear(team, w, at<const float>(x), m, at<float>(parts), m * w.n); });
}

void run_gated(Team& team, const Packed& gate_up, const Packed& down, Address x, int64_t m,
               int64_t k, Address y, bool parts) {
  const Weight& d = down.weight;
  require_columns(gate_up.weight, k);
  require(gate_up.weight.n == 2 * d.k, "gate and up are not each as wide as down is long");
  unlocked(m * d.n * d.k / 16, [&] {
    gated(team, gate_up.weight, d, at<const float>(x), m, at<float>(y), parts ? m * d.n : 0);
  });
}

void run_embed(Team& team, const Packed& packed, Address ids, int64_t rows, Address out) {
  const int64_t* id = at<const int64_t>(ids);
  for (int64_t i = 0; i < rows; ++i) {
    require(id[i] >= 0 && id[i] < packed.weight.n, "a token id is outside the table");
  }
  const int64_t k = packed.weight.k, rows_task = 16;
  unlocked(rows * k, [&] {
    team.run(ceil_div(rows, rows_task), [&](int64_t task) {
      const int64_t end = std::min(rows, (task + 1) * rows_task);
      for (int64_t i = task * rows_task; i < end; ++i) {
        unpack_row(packed.weight, id[i], at<float>(out) + i * k);
      }
    });
  });
}

}  // namespace

void bind_linear(py::module_& module) {
  py::class_<Packed>(module, "Packed")
      .def_property_readonly("n", [](const Packed& p) { return p.weight.n; })
      .def_property_readonly("k", [](const Packed& p) { return p.weight.k; })
      .def_property_readonly("row_blocks", [](const Packed& p) { return p.weight.row_blocks; })
      .def_property_readonly("nbytes", &Packed::nbytes);
  module.def("pack", &pack);
  module.def("pack_blocks", &pack_rows);
  module.def("linear", &run_linear);
  module.def("gated", &run_gated);
  module.def("linear_parts", &run_linear_parts);
  module.def("embed_packed", &run_embed);
}

}  // namespace aserve
