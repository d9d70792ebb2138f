#include "aserve/attention.h"

#include "attend.h"
#include "bind.h"

namespace aserve {

void check(const Attention& call, int64_t rows) {
  require(call.k_shape.pages == call.v_shape.pages && call.k_shape.heads == call.v_shape.heads &&
              call.k_shape.page_size == call.v_shape.page_size &&
              call.k_shape.dim == call.v_shape.dim,
          "k and v pages differ in shape");
  require(call.scale > 0.0f, "scale is not positive");
  require(call.heads % call.k_shape.heads == 0, "heads is not a multiple of kv_heads");
  require(call.row_start[0] == 0, "row_start does not begin at 0");
  require(call.row_start[call.sequences] == rows, "row_start does not end at the number of rows");
  for (int64_t n = 0; n < call.sequences; ++n) {
    require(call.row_start[n] <= call.row_start[n + 1], "row_start decreases");
  }
  for (int64_t n = 0; n < call.sequences; ++n) {
    const int64_t own = call.row_start[n + 1] - call.row_start[n];
    if (own == 0) continue;
    const int32_t* positions = call.positions + call.row_start[n];
    for (int64_t i = 0; i < own; ++i) {
      require(positions[i] > (i == 0 ? -1 : positions[i - 1]),
              "positions of a sequence do not ascend from 0 or more");
    }
    require(positions[own - 1] < call.kv_len[n], "a position is not below kv_len");
    const int64_t pages = ceil_div(call.kv_len[n], call.k_shape.page_size);
    require(pages <= call.pages_max, "kv_len is more than the page table holds");
    require_range(call.page_table + n * call.pages_max, pages, call.k_shape.pages, "page");
  }
}

void set_pages(Attention* call, const py::tuple& pool) {
  call->type = pool[0].cast<bool>() ? Type::bf16 : Type::f32;
  call->k = at<const void>(pool[1].cast<Address>());
  call->v = at<const void>(pool[2].cast<Address>());
  call->k_shape = page_shape(pool[3].cast<py::tuple>());
  call->v_shape = page_shape(pool[4].cast<py::tuple>());
}

void set_attend(Attention* call, const py::tuple& attend) {
  call->sequences = attend[0].cast<int64_t>();
  call->row_start = at<const int32_t>(attend[1].cast<Address>());
  call->positions = at<const int32_t>(attend[2].cast<Address>());
  call->kv_len = at<const int32_t>(attend[3].cast<Address>());
  call->page_table = at<const int32_t>(attend[4].cast<Address>());
  call->pages_max = attend[5].cast<int64_t>();
}

namespace {

void run_attention(Team& team, Address q, int64_t q_stride, int64_t rows, int64_t heads,
                   const py::tuple& pool, const py::tuple& step, float scale, Address out) {
  Attention call{};
  set_pages(&call, pool);
  set_attend(&call, step);
  call.heads = heads;
  call.scale = scale;
  call.q = at<const float>(q);
  call.q_stride = q_stride;
  call.out = at<float>(out);
  check(call, rows);
  py::gil_scoped_release release;
  attention(team, call);
}

}  // namespace

void bind_attention(py::module_& module) { module.def("attention", &run_attention); }

}  // namespace aserve
