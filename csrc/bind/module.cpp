#include "bind.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels. Addresses are Tensor.data_ptr(); callers keep the tensors alive.";
  aserve::bind_board(module);
  aserve::bind_cpu(module);
  aserve::bind_linear(module);
  aserve::bind_rows(module);
  aserve::bind_kv(module);
  aserve::bind_attention(module);
  aserve::bind_block(module);
  aserve::bind_draft(module);
  aserve::bind_context_parallel(module);
  aserve::bind_tree(module);
#if __has_include("sample.cpp")
  aserve::bind_sample(module);
#endif
}
