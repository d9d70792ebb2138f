#include "aserve/attention.h"

#include <algorithm>

#include "attend.h"
#include "bind.h"

namespace aserve {

namespace {

int64_t path_len(const Attention& call, int64_t row) {
  return call.path_start[row + 1] - call.path_start[row];
}

void check_paths(const Attention& call, int64_t rows) {
  if (call.path_start == nullptr) return;
  require(call.path_start[0] == 0, "path_start does not begin at 0");
  require(call.path_start[rows] == call.paths_len, "path_start does not end at the length of paths");
  for (int64_t row = 0; row < rows; ++row) {
    require(path_len(call, row) >= 0, "path_start decreases");
  }
}

void check_tree(const Attention& call, int64_t n) {
  int64_t start = -1;
  for (int64_t row = call.row_start[n]; row < call.row_start[n + 1]; ++row) {
    const int64_t len = path_len(call, row), own = call.positions[row] + 1 - len;
    require(len > 0, "a sequence has rows with and without a path");
    require(own >= 0 && (start < 0 || own == start), "paths of a tree do not begin together");
    start = own;
    require_range(call.paths + call.path_start[row], len, call.kv_len[n] - start, "path");
  }
}

}  // namespace

void check(const Attention& call, int64_t rows) {
  require(call.k_shape.pages == call.v_shape.pages && call.k_shape.heads == call.v_shape.heads &&
              call.k_shape.page_size == call.v_shape.page_size &&
              call.k_shape.dim == call.v_shape.dim,
          "k and v pages differ in shape");
  require(call.k_shape.dim > 0 && call.dim() > 0, "pages have no room for values");
  require(call.scale > 0.0f, "scale is not positive");
  require(call.window >= 0, "window is negative");
  require(call.heads % call.k_shape.heads == 0, "heads is not a multiple of kv_heads");
  require(call.row_start[0] == 0, "row_start does not begin at 0");
  require(call.row_start[call.sequences] == rows, "row_start does not end at the number of rows");
  for (int64_t n = 0; n < call.sequences; ++n) {
    require(call.row_start[n] <= call.row_start[n + 1], "row_start decreases");
  }
  check_paths(call, rows);
  for (int64_t n = 0; n < call.sequences; ++n) {
    const int64_t own = call.row_start[n + 1] - call.row_start[n];
    if (own == 0) continue;
    const int32_t* positions = call.positions + call.row_start[n];
    if (call.path_start != nullptr && path_len(call, call.row_start[n]) > 0) {
      check_tree(call, n);
    } else {
      for (int64_t i = 0; i < own; ++i) {
        require(positions[i] > (i == 0 ? -1 : positions[i - 1]),
                "positions of a sequence do not ascend from 0 or more");
        require(call.path_start == nullptr || path_len(call, call.row_start[n] + i) == 0,
                "a sequence has rows with and without a path");
      }
    }
    require(*std::max_element(positions, positions + own) < call.kv_len[n],
            "a position is not below kv_len");
    const int64_t pages = ceil_div(call.kv_len[n], call.k_shape.page_size);
    require(pages <= call.pages_max, "kv_len is more than the page table holds");
    require_range(call.page_table + n * call.pages_max, pages, call.k_shape.pages, "page");
  }
}

void set_pages(Attention* call, const py::tuple& pool) {
  call->type = static_cast<Type>(pool[0].cast<int>());
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
  call->path_start = at<const int32_t>(attend[6].cast<Address>());
  call->paths = at<const int32_t>(attend[7].cast<Address>());
  call->paths_len = attend[8].cast<int64_t>();
}

namespace {

// q: (address, stride, heads); softmax: (scale, window, sinks or 0).
void run_attention(Team& team, const py::tuple& q, int64_t rows, const py::tuple& pool,
                   const py::tuple& step, const py::tuple& softmax, Address out) {
  Attention call{};
  set_pages(&call, pool);
  set_attend(&call, step);
  call.q = at<const float>(q[0].cast<Address>());
  call.q_stride = q[1].cast<int64_t>();
  call.heads = q[2].cast<int64_t>();
  call.scale = softmax[0].cast<float>();
  call.window = softmax[1].cast<int64_t>();
  call.sinks = at<const float>(softmax[2].cast<Address>());
  call.out = at<float>(out);
  check(call, rows);
  py::gil_scoped_release release;
  attention(team, call);
}

}  // namespace

void bind_attention(py::module_& module) { module.def("attention", &run_attention); }

}  // namespace aserve
