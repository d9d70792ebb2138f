#include "aserve/rows.h"

#include "bind.h"

namespace aserve {
namespace {

void run_norm(Team& team, Address x, int64_t x_stride, Address weight, Address y, int64_t rows,
              int64_t heads, int64_t dim, float eps) {
  const Norm call{at<const float>(x), x_stride, nullptr, nullptr, at<const float>(weight),
                  at<float>(y),       rows,     heads,   dim,     eps};
  unlocked(rows * heads * dim, [&] { rms_norm(team, call); });
}

void run_add_norm(Team& team, Address residual, Address x, Address weight, Address total,
                  Address y, int64_t rows, int64_t dim, float eps) {
  const Norm call{at<const float>(x), dim,  at<const float>(residual),
                  at<float>(total),   at<const float>(weight),
                  at<float>(y),       rows, 1,
                  dim,                eps};
  unlocked(rows * dim, [&] { rms_norm(team, call); });
}

void run_rope(Team& team, Address q, int64_t q_stride, int64_t q_heads, Address k,
              int64_t k_stride, int64_t k_heads, int64_t rows, int64_t dim, Address positions,
              Address cos_sin, int64_t positions_max, int64_t rot) {
  require(rot > 0 && rot % 2 == 0 && rot <= dim, "rot is not an even number up to head_dim");
  require_range(at<const int32_t>(positions), rows, positions_max, "position");
  const Rope call{at<float>(q), at<float>(k), q_stride, k_stride,
                  q_heads,      k_heads,      rows,     dim,
                  rot,          at<const int32_t>(positions),
                  at<const float>(cos_sin)};
  unlocked(rows * (q_heads + k_heads) * rot, [&] { rope(team, call); });
}

void run_add(Team& team, Address x, Address y, Address out, int64_t n) {
  unlocked(n, [&] { add(team, at<const float>(x), at<const float>(y), at<float>(out), n); });
}

void run_silu_mul(Team& team, Address gate_up, Address out, int64_t rows, int64_t dim) {
  unlocked(rows * dim * 4,
           [&] { silu_mul(team, at<const float>(gate_up), at<float>(out), rows, dim); });
}

void run_embed(bool is_bf16, Address table, int64_t vocab, int64_t dim, Address ids, int64_t rows,
               Address out) {
  const int64_t* id = at<const int64_t>(ids);
  for (int64_t i = 0; i < rows; ++i) {
    require(id[i] >= 0 && id[i] < vocab, "a token id is outside the table");
  }
  embed(is_bf16 ? Type::bf16 : Type::f32, at<const void>(table), dim, id, rows, at<float>(out));
}

}  // namespace

void bind_rows(py::module_& module) {
  module.def("rms_norm", &run_norm);
  module.def("add_rms_norm", &run_add_norm);
  module.def("rope", &run_rope);
  module.def("add", &run_add);
  module.def("silu_mul", &run_silu_mul);
  module.def("embed", &run_embed);
}

}  // namespace aserve
