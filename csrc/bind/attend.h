// Attention's tuples from Python, shared by the bindings that take them.
#pragma once

#include "aserve/attention.h"
#include "bind.h"

namespace aserve {

// (type by its number, k, v, k_shape, v_shape)
void set_pages(Attention* call, const py::tuple& pool);
// (sequences, row_start, positions, kv_len, page_table, pages_max, path_start, paths, paths_len);
// the last three are 0 without a tree.
void set_attend(Attention* call, const py::tuple& attend);
// Everything a kernel would otherwise read or write out of bounds.
void check(const Attention& call, int64_t rows);

}  // namespace aserve
