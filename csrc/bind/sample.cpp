#include "aserve/sample.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aserve/noise.h"
#include "bind.h"

namespace aserve {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// Elements of an array or None; the array outlives the call, as its row tuple holds it.
template <class T>
const T* elements(const py::handle& object, int64_t* n) {
  *n = 0;
  if (object.is_none()) return nullptr;
  require(py::isinstance<Array<T>>(object), "an array has the wrong type");
  const auto array = py::reinterpret_borrow<Array<T>>(object);
  *n = array.size();
  return array.data();
}

template <class T>
const T* elements(const py::handle& object, int64_t n_wanted) {
  int64_t n = 0;
  const T* data = elements<T>(object, &n);
  require(n == n_wanted, "two arrays of a row differ in length");
  return data;
}

// What all draws of one sequence have in common.
struct DrawParams {
  DrawRow row{};
  uint64_t seed = 0;
  py::object bias_ids, bias;  // keep the arrays
};

DrawParams draw_params(const py::tuple& given) {
  require(given.size() == 10, "there are 10 parameters");
  DrawParams out;
  out.row.temperature = given[0].cast<double>();
  out.row.top_k = given[1].cast<int64_t>();
  out.row.top_p = given[2].cast<double>();
  out.row.min_p = given[3].cast<double>();
  out.row.presence = given[4].cast<double>();
  out.row.frequency = given[5].cast<double>();
  out.row.repetition = given[6].cast<double>();
  out.seed = given[7].cast<uint64_t>();
  out.bias_ids = given[8];
  out.bias = given[9];
  out.row.bias_ids = elements<int32_t>(out.bias_ids, &out.row.bias_n);
  out.row.bias = elements<double>(out.bias, out.row.bias_n);
  require(out.row.temperature >= 0 && out.row.top_k >= 0 && out.row.top_p > 0 &&
              out.row.min_p >= 0 && out.row.min_p <= 1 && out.row.repetition > 0,
          "a sampling parameter is out of range");
  return out;
}

// (params, position) or (params, position, mask, seen_ids, seen, banned).
DrawRow draw_row(const py::tuple& row, const float* logits, int64_t vocab) {
  require(row.size() == 2 || row.size() == 6, "a row has 2 or 6 fields");
  const auto& params = row[0].cast<const DrawParams&>();
  DrawRow out = params.row;
  out.logits = logits;
  out.key = draw_key(params.seed, row[1].cast<uint64_t>());
  if (row.size() == 2) return out;
  int64_t words = 0;
  out.mask = elements<uint32_t>(row[2], &words);
  require(out.mask == nullptr || words == (vocab + 31) / 32, "a mask has the wrong length");
  out.seen_ids = elements<int32_t>(row[3], &out.seen_n);
  out.seen = elements<int32_t>(row[4], out.seen_n);
  out.banned = elements<int32_t>(row[5], &out.banned_n);
  return out;
}

// The token of each row, or less than 0 where there is none: minus the status.
py::list run_draw(Team* team, Address logits, int64_t stride, int64_t vocab, const py::list& rows) {
  require(vocab > 0, "an empty vocabulary");
  std::vector<DrawRow> calls;
  calls.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* row = at<const float>(logits) + static_cast<int64_t>(i) * stride;
    calls.push_back(draw_row(py::reinterpret_borrow<py::tuple>(rows[i]), row, vocab));
  }
  const int64_t n = static_cast<int64_t>(calls.size());
  unlocked(n * vocab, [&] { draw(team, vocab, calls.data(), n); });
  py::list out(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const bool drawn = calls[i].status == Drawn::token;
    out[i] = drawn ? calls[i].token : -static_cast<int64_t>(calls[i].status);
  }
  return out;
}

// None or (logprob, ((id, logprob), ...)) for each (row, token, top_n).
py::list run_logprobs(Team* team, Address logits, int64_t stride, int64_t vocab,
                      const py::list& rows) {
  require(vocab > 0, "an empty vocabulary");
  const size_t n = rows.size();
  std::vector<LogprobRow> calls(n);
  std::vector<std::vector<int32_t>> ids(n);
  std::vector<std::vector<double>> values(n);
  for (size_t i = 0; i < n; ++i) {
    const auto [row, token, top_n] = rows[i].cast<std::tuple<int64_t, int64_t, int64_t>>();
    require(row >= 0, "a row is negative");
    require(token >= 0 && token < vocab, "a token id is outside the vocabulary");
    require(top_n >= 0, "a count is negative");
    ids[i].resize(std::min(top_n, vocab));
    values[i].resize(ids[i].size());
    calls[i] = {at<const float>(logits) + row * stride,
                token,
                static_cast<int64_t>(ids[i].size()),
                0,
                ids[i].data(),
                values[i].data(),
                false};
  }
  unlocked(static_cast<int64_t>(n) * vocab,
           [&] { logprobs(team, vocab, calls.data(), static_cast<int64_t>(n)); });
  py::list out(n);
  for (size_t i = 0; i < n; ++i) {
    if (!calls[i].ok) {
      out[i] = py::none();
      continue;
    }
    py::tuple top(calls[i].top_n);
    for (int64_t j = 0; j < calls[i].top_n; ++j) {
      top[j] = py::make_tuple(ids[i][j], values[i][j]);
    }
    out[i] = py::make_tuple(calls[i].logprob, top);
  }
  return out;
}

}  // namespace

void bind_sample(py::module_& module) {
  py::class_<DrawParams>(module, "DrawParams").def(py::init(&draw_params));
  module.def("draw", &run_draw);
  module.def("logprobs", &run_logprobs);
}

}  // namespace aserve
