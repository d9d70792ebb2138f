// Shared by the binding files: each registers its functions through a bind_* of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "aserve/index.h"
#include "aserve/number.h"
#include "aserve/team.h"

namespace py = pybind11;

namespace aserve {

using Address = uintptr_t;  // Tensor.data_ptr()

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool good, const char* message) {
  if (!good) throw py::value_error(message);
}

// Small jobs keep the GIL: giving it away and taking it back can cost more than the job itself.
constexpr int64_t unlocked_from = 32768;  // elements touched

template <class Work>
void unlocked(int64_t elements, Work&& work) {
  if (elements < unlocked_from) {
    work();
    return;
  }
  py::gil_scoped_release release;
  std::forward<Work>(work)();
}

inline void require_range(const int32_t* values, int64_t n, int64_t end, const char* what) {
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] < 0 || values[i] >= end) {
      throw py::value_error(std::string(what) + " " + std::to_string(values[i]) +
                            " is outside [0, " + std::to_string(end) + ")");
    }
  }
}

// (pages, page_size, heads, dim, page_stride) from Python.
inline PageShape page_shape(const py::tuple& shape) {
  require(shape.size() == 5, "a page shape has five numbers");
  const PageShape s{shape[0].cast<int64_t>(), shape[1].cast<int64_t>(), shape[2].cast<int64_t>(),
                    shape[3].cast<int64_t>(), shape[4].cast<int64_t>()};
  require(s.pages >= 0 && s.page_size > 0 && s.heads > 0 && s.dim > 0, "empty page shape");
  require(s.page_stride >= s.page_size * s.heads * s.dim, "pages overlap");
  return s;
}

void bind_attention(py::module_& module);
void bind_block(py::module_& module);
void bind_board(py::module_& module);
void bind_context_parallel(py::module_& module);
void bind_cpu(py::module_& module);
void bind_draft(py::module_& module);
void bind_kv(py::module_& module);
void bind_linear(py::module_& module);
void bind_rows(py::module_& module);
void bind_sample(py::module_& module);
void bind_tree(py::module_& module);

}  // namespace aserve
