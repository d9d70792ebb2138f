#include "aserve/kv.h"

#include <vector>

#include "bind.h"

namespace aserve {
namespace {

Type type_of(bool is_bf16) { return is_bf16 ? Type::bf16 : Type::f32; }

void run_append(Team& team, bool is_bf16, Address x, int64_t x_stride, Address pool,
                const py::tuple& shape_of, Address slots, int64_t rows) {
  const PageShape shape = page_shape(shape_of);
  require_range(at<const int32_t>(slots), rows, shape.pages * shape.page_size, "slot");
  unlocked(rows * shape.heads * shape.dim, [&] {
    kv_append(team, at<const float>(x), x_stride, type_of(is_bf16), at<void>(pool), shape,
              at<const int32_t>(slots), rows);
  });
}

void run_gather(Team& team, bool is_bf16, Address pool, const py::tuple& shape_of, Address slots,
                int64_t rows, Address out) {
  const PageShape shape = page_shape(shape_of);
  require_range(at<const int32_t>(slots), rows, shape.pages * shape.page_size, "slot");
  unlocked(rows * shape.heads * shape.dim, [&] {
    kv_gather(team, type_of(is_bf16), at<const void>(pool), shape, at<const int32_t>(slots), rows,
              at<void>(out));
  });
}

void run_move(Team& team, bool is_bf16, Address pool, const py::tuple& shape_of, Address from,
              Address to, int64_t rows) {
  const PageShape shape = page_shape(shape_of);
  require_range(at<const int32_t>(from), rows, shape.pages * shape.page_size, "slot");
  require_range(at<const int32_t>(to), rows, shape.pages * shape.page_size, "slot");
  const Type type = type_of(is_bf16);
  const int64_t bytes = rows * shape.heads * shape.dim * type_bytes(type);
  std::vector<char> held(static_cast<size_t>(bytes));
  unlocked(rows * shape.heads * shape.dim, [&] {
    // Through a copy, because a slot may be a source of one row and a destination of another.
    kv_gather(team, type, at<const void>(pool), shape, at<const int32_t>(from), rows, held.data());
    kv_scatter(team, type, at<void>(pool), shape, at<const int32_t>(to), rows, held.data());
  });
}

}  // namespace

void bind_kv(py::module_& module) {
  module.def("kv_append", &run_append);
  module.def("kv_gather", &run_gather);
  module.def("kv_move", &run_move);
}

}  // namespace aserve
