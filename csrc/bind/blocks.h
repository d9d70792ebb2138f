// What the bindings of blocks and of draft heads take from Python.
#pragma once

#include <mutex>
#include <vector>

#include "aserve/block.h"
#include "attend.h"
#include "bind.h"

namespace aserve {

using Floats = std::vector<float>;

// A workspace and whose turn it is with it.
struct SharedSpace {
  Workspace space;
  std::mutex turns;
};

inline Floats copied(Address address, int64_t n) {
  return address == 0 ? Floats() : Floats(at<const float>(address), at<const float>(address) + n);
}

inline const float* or_null(const Floats& x) { return x.empty() ? nullptr : x.data(); }

inline KvPages kv_pages(const py::tuple& pool) {
  return {static_cast<Type>(pool[0].cast<int>()), at<void>(pool[1].cast<Address>()),
          at<void>(pool[2].cast<Address>()), page_shape(pool[3].cast<py::tuple>()),
          page_shape(pool[4].cast<py::tuple>())};
}

// step: (rows, slots, attend as in attend.h, cos_sin, positions, rot).
inline BlockStep block_step(const py::tuple& step) {
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

inline void require_fit(const AttentionBlock& block, const BlockStep& step, const KvPages& pages) {
  require(step.rot <= block.dim, "rot is more than head_dim");
  for (const PageShape* shape : {&pages.k_shape, &pages.v_shape}) {
    require(shape->heads == block.kv_heads && values_of(pages.type, shape->dim) == block.dim,
            "pages do not fit the heads of the block");
  }
}

// Whatever a block could read or write out of bounds.
inline void check_step(const AttentionBlock& block, const BlockStep& step, const py::tuple& pool) {
  const KvPages pages = kv_pages(pool);
  require_fit(block, step, pages);
  Attention call = step.attend;
  set_pages(&call, pool);
  call.heads = block.heads;
  call.scale = block.scale;
  check(call, step.rows);
  require_range(step.slots, step.rows, pages.k_shape.pages * pages.k_shape.page_size, "slot");
}

template <class Work>
void in_turn(SharedSpace& shared, const Work& work) {
  py::gil_scoped_release release;
  std::lock_guard<std::mutex> turn(shared.turns);
  work(shared.space);
}

}  // namespace aserve
