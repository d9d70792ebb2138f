#include "aserve/context_parallel.h"

#include <algorithm>
#include <cstring>

namespace aserve {
namespace {

constexpr int64_t bytes_task = 65536;

// Calls copy(i, n) for runs of rows whose indices are consecutive, which together are all rows.
template <class Copy>
void share_runs(Team& team, const int32_t* index, int64_t rows, int64_t row_bytes,
                const Copy& copy) {
  if (row_bytes == 0) return;
  const int64_t step = std::max<int64_t>(1, bytes_task / row_bytes);
  team.run(ceil_div(rows, step), [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * step);
    for (int64_t i = task * step, next; i < end; i = next) {
      next = i + 1;
      while (next < end && index[next] == index[next - 1] + 1) ++next;
      copy(i, next - i);
    }
  });
}

void copy_rows(const char* x, int64_t x_stride, int64_t row_bytes, int64_t rows, char* out) {
  if (x_stride == row_bytes) {
    std::memcpy(out, x, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(out + i * row_bytes, x + i * x_stride, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

void cp_counts(CpKind kind, int64_t cp, const int64_t* lengths, int64_t sequences,
               int32_t* counts) {
  for (int64_t rank = 0; rank < cp; ++rank) {
    int64_t start = 0;
    for (int64_t n = 0; n < sequences; start += lengths[n++]) {
      *counts++ = static_cast<int32_t>(cp_count({kind, cp, rank}, start, lengths[n]));
    }
  }
}

int64_t cp_index(const CpRank& r, const int64_t* lengths, int64_t sequences, int32_t* rows) {
  int64_t start = 0, at = 0;
  for (int64_t n = 0; n < sequences; start += lengths[n++]) {
    const int64_t count = cp_count(r, start, lengths[n]);
    if (rows != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        rows[at + i] = static_cast<int32_t>(cp_row(r, start, lengths[n], i));
      }
    }
    at += count;
  }
  return at;
}

void gather_rows(Team& team, const void* x, int64_t x_stride, int64_t row_bytes,
                 const int32_t* index, int64_t rows, void* out) {
  share_runs(team, index, rows, row_bytes, [&](int64_t i, int64_t n) {
    copy_rows(static_cast<const char*>(x) + index[i] * x_stride, x_stride, row_bytes, n,
              static_cast<char*>(out) + i * row_bytes);
  });
}

void scatter_rows(Team& team, const void* x, int64_t x_stride, int64_t row_bytes,
                  const int32_t* index, int64_t rows, void* out) {
  share_runs(team, index, rows, row_bytes, [&](int64_t i, int64_t n) {
    copy_rows(static_cast<const char*>(x) + i * x_stride, x_stride, row_bytes, n,
              static_cast<char*>(out) + index[i] * row_bytes);
  });
}

}  // namespace aserve
