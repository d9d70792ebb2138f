#include "aserve/kv.h"

#include <algorithm>
#include <vector>

#include "bind.h"

namespace aserve {
namespace {

// k, v: (address, stride, pool, its shape).
void run_append(Team& team, int type, const py::tuple& k, const py::tuple& v, Address slots,
                int64_t rows) {
  KvAppend call{};
  call.type = static_cast<Type>(type);
  call.k = at<const float>(k[0].cast<Address>());
  call.k_stride = k[1].cast<int64_t>();
  call.k_pool = at<void>(k[2].cast<Address>());
  call.k_shape = page_shape(k[3].cast<py::tuple>());
  call.v = at<const float>(v[0].cast<Address>());
  call.v_stride = v[1].cast<int64_t>();
  call.v_pool = at<void>(v[2].cast<Address>());
  call.v_shape = page_shape(v[3].cast<py::tuple>());
  call.slots = at<const int32_t>(slots);
  call.rows = rows;
  const PageShape& shape = call.k_shape;
  const int64_t slots_n = std::min(shape.pages * shape.page_size,
                                   call.v_shape.pages * call.v_shape.page_size);
  require(values_of(call.type, std::min(shape.dim, call.v_shape.dim)) > 0,
          "pages have no room for values");
  require_range(call.slots, rows, slots_n, "slot");
  unlocked(2 * rows * shape.heads * shape.dim, [&] { kv_append(team, call); });
}

void run_gather(Team& team, int type_code, Address pool, const py::tuple& shape_of, Address slots,
                int64_t rows, Address out) {
  const PageShape shape = page_shape(shape_of);
  require_range(at<const int32_t>(slots), rows, shape.pages * shape.page_size, "slot");
  unlocked(rows * shape.heads * shape.dim, [&] {
    kv_gather(team, static_cast<Type>(type_code), at<const void>(pool), shape, at<const int32_t>(slots), rows,
              at<void>(out));
  });
}

void run_move(Team& team, int type_code, Address pool, const py::tuple& shape_of, Address from,
              Address to, int64_t rows) {
  const PageShape shape = page_shape(shape_of);
  require_range(at<const int32_t>(from), rows, shape.pages * shape.page_size, "slot");
  require_range(at<const int32_t>(to), rows, shape.pages * shape.page_size, "slot");
  const Type type = static_cast<Type>(type_code);
  const int64_t bytes = rows * shape.heads * shape.dim * type_bytes(type);
  std::vector<char> held(static_cast<size_t>(bytes));
  unlocked(rows * shape.heads * shape.dim, [&] {
    // Through a copy, because a slot may be a source of one row and a destination of another.
    kv_gather(team, type, at<const void>(pool), shape, at<const int32_t>(from), rows, held.data());
    kv_scatter(team, type, at<void>(pool), shape, at<const int32_t>(to), rows, held.data());
  });
}

// The pools of all layers, told once.
struct Pools {
  std::vector<KvPool> pools;
  int64_t slots = INT32_MAX;  // that all of them have
};

// Each: (type, address, its shape).
Pools pools_of(const py::sequence& given) {
  Pools out;
  for (const auto& item : given) {
    const auto one = item.cast<py::tuple>();
    require(one.size() == 3, "a pool is a type, an address and a shape");
    const PageShape shape = page_shape(one[2].cast<py::tuple>());
    out.pools.push_back(
        {static_cast<Type>(one[0].cast<int>()), at<void>(one[1].cast<Address>()), shape});
    out.slots = std::min(out.slots, shape.pages * shape.page_size);
  }
  return out;
}

// Pairs of -1 are left out.
void run_move_all(Team& team, const Pools& pools, Address from, Address to, int64_t rows) {
  std::vector<int32_t> sources, targets;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t source = at<const int32_t>(from)[row], target = at<const int32_t>(to)[row];
    if (source == -1 && target == -1) continue;
    sources.push_back(source);
    targets.push_back(target);
  }
  const int64_t n = static_cast<int64_t>(sources.size());
  require_range(sources.data(), n, pools.slots, "slot");
  require_range(targets.data(), n, pools.slots, "slot");
  int64_t elements = 0;
  for (const KvPool& pool : pools.pools) elements += n * pool.shape.heads * pool.shape.dim;
  unlocked(elements, [&] {
    kv_move(team, pools.pools.data(), static_cast<int64_t>(pools.pools.size()), sources.data(),
            targets.data(), n);
  });
}

// Everything a copy would otherwise read or write out of bounds, or twice.
void check(const KvCopy& c, int64_t from_pages, int64_t to_pages) {
  require(c.from_shape.dim == c.to_shape.dim, "source and destination differ in head_dim");
  require(0 <= c.begin && c.begin <= c.end, "tokens [begin, end) are no range");
  require(c.heads >= 1 && c.from_head >= 0 && c.heads <= c.from_shape.heads - c.from_head,
          "heads are outside the source");
  require(c.to_head >= 0 && c.heads <= c.to_shape.heads - c.to_head,
          "heads are outside the destination");
  if (c.begin == c.end) return;
  require(c.end <= from_pages * c.from_shape.page_size, "tokens are outside the source's pages");
  require(c.end <= to_pages * c.to_shape.page_size, "tokens are outside the destination's pages");
  const int32_t* from = c.from_pages + c.begin / c.from_shape.page_size;
  const int32_t* from_end = c.from_pages + ceil_div(c.end, c.from_shape.page_size);
  const int32_t* to = c.to_pages + c.begin / c.to_shape.page_size;
  const int32_t* to_end = c.to_pages + ceil_div(c.end, c.to_shape.page_size);
  require_range(from, from_end - from, c.from_shape.pages, "source page");
  require_range(to, to_end - to, c.to_shape.pages, "destination page");
  std::vector<int32_t> written(to, to_end);
  std::sort(written.begin(), written.end());
  require(std::adjacent_find(written.begin(), written.end()) == written.end(),
          "a destination page occurs twice");
  for (; c.from == c.to && from != from_end; ++from) {
    require(!std::binary_search(written.begin(), written.end(), *from),
            "a page is source and destination");
  }
}

// from, to: (address, shape, page table, its length, first head); what: (heads, begin, end).
void run_copy(Team& team, int type_code, const py::tuple& from, const py::tuple& to,
              const py::tuple& what) {
  KvCopy c{};
  c.type = static_cast<Type>(type_code);
  c.from = at<const void>(from[0].cast<Address>());
  c.from_shape = page_shape(from[1].cast<py::tuple>());
  c.from_pages = at<const int32_t>(from[2].cast<Address>());
  c.from_head = from[4].cast<int64_t>();
  c.to = at<void>(to[0].cast<Address>());
  c.to_shape = page_shape(to[1].cast<py::tuple>());
  c.to_pages = at<const int32_t>(to[2].cast<Address>());
  c.to_head = to[4].cast<int64_t>();
  c.heads = what[0].cast<int64_t>();
  c.begin = what[1].cast<int64_t>();
  c.end = what[2].cast<int64_t>();
  check(c, from[3].cast<int64_t>(), to[3].cast<int64_t>());
  unlocked((c.end - c.begin) * c.heads * c.from_shape.dim, [&] { kv_copy(team, c); });
}

}  // namespace

void bind_kv(py::module_& module) {
  module.def("kv_append", &run_append);
  module.def("kv_gather", &run_gather);
  module.def("kv_move", &run_move);
  module.def("kv_copy", &run_copy);
  py::class_<Pools>(module, "KvPools").def(py::init(&pools_of));
  module.def("kv_move_all", &run_move_all);
}

}  // namespace aserve
