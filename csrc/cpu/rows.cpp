#include "aserve/rows.h"

#include <cstring>

#include "kernels.h"
#include "share.h"

namespace aserve {

void rms_norm(Team& team, const Norm& call) {
  const Kernels& k = kernels();
  share_rows(team, call.rows, call.heads * call.dim,
             [&](int64_t begin, int64_t end) { k.norm(call, begin, end); });
}

void rope(Team& team, const Rope& call) {
  const Kernels& k = kernels();
  share_rows(team, call.rows, (call.q_heads + call.k_heads) * call.rot,
             [&](int64_t begin, int64_t end) { k.rope(call, begin, end); });
}

void add(Team& team, const float* x, const float* y, float* out, int64_t n) {
  const Kernels& k = kernels();
  share_rows(team, n, 1, [&](int64_t begin, int64_t end) {
    k.add(x + begin, y + begin, out + begin, end - begin);
  });
}

void silu_mul(Team& team, const float* gate_up, float* out, int64_t rows, int64_t dim) {
  const Kernels& k = kernels();
  share_rows(team, rows, 2 * dim, [&](int64_t begin, int64_t end) {
    k.silu_mul(gate_up + begin * 2 * dim, out + begin * dim, end - begin, dim);
  });
}

void embed(Type type, const void* table, int64_t dim, const int64_t* ids, int64_t rows,
           float* out) {
  const Kernels& k = kernels();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = ids[row] * dim;
    if (type == Type::bf16) {
      k.widen(static_cast<const uint16_t*>(table) + at, dim, out + row * dim);
    } else {
      std::memcpy(out + row * dim, static_cast<const float*>(table) + at,
                  static_cast<size_t>(dim) * sizeof(float));
    }
  }
}

}  // namespace aserve
