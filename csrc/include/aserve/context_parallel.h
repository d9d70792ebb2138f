// Which rows of an attention group each context-parallel rank holds. A group's rows lie sequence
// after sequence. A rank keeps its rows in that order too: those of a sequence are together and
// ascend, which is what attention wants of them.
//
// interleave  row j of the group is of rank j mod cp, without a restart at a sequence
// zigzag      a sequence is 2 cp blocks, the first length mod 2 cp of them one row longer; rank r has
//             blocks r and 2 cp - 1 - r, so that all ranks see about as many keys
#pragma once

#include <cstdint>

#include "aserve/index.h"
#include "aserve/team.h"

namespace aserve {

enum class CpKind { interleave = 0, zigzag = 1 };

struct CpRank {
  CpKind kind;
  int64_t cp, rank;
};

// First row of a block of a sequence, counted in the sequence; block 2 cp is its end.
ASERVE_HD int64_t cp_block_start(int64_t cp, int64_t length, int64_t block) {
  const int64_t least = length / (2 * cp), longer = length - least * 2 * cp;
  return block * least + (block < longer ? block : longer);
}

// Rows of a rank below row `end` of the group.
ASERVE_HD int64_t cp_interleaved_below(const CpRank& r, int64_t end) {
  return (end + r.cp - 1 - r.rank) / r.cp;
}

// How many rows of a sequence, rows [start, start + length) of its group, a rank holds.
ASERVE_HD int64_t cp_count(const CpRank& r, int64_t start, int64_t length) {
  if (r.kind == CpKind::interleave) {
    return cp_interleaved_below(r, start + length) - cp_interleaved_below(r, start);
  }
  const int64_t last = 2 * r.cp - 1 - r.rank;
  return cp_block_start(r.cp, length, r.rank + 1) - cp_block_start(r.cp, length, r.rank) +
         cp_block_start(r.cp, length, last + 1) - cp_block_start(r.cp, length, last);
}

// The row of the group that is a rank's i-th of a sequence, 0 <= i < cp_count.
ASERVE_HD int64_t cp_row(const CpRank& r, int64_t start, int64_t length, int64_t i) {
  if (r.kind == CpKind::interleave) {
    return (cp_interleaved_below(r, start) + i) * r.cp + r.rank;
  }
  const int64_t first = cp_block_start(r.cp, length, r.rank);
  const int64_t first_len = cp_block_start(r.cp, length, r.rank + 1) - first;
  if (i < first_len) return start + first + i;
  return start + cp_block_start(r.cp, length, 2 * r.cp - 1 - r.rank) + i - first_len;
}

// counts[rank, sequence] of every rank.
void cp_counts(CpKind kind, int64_t cp, const int64_t* lengths, int64_t sequences, int32_t* counts);

// The rows of the group that a rank holds, in its order; returns their number. `rows` may be null.
int64_t cp_index(const CpRank& r, const int64_t* lengths, int64_t sequences, int32_t* rows);

// Rows of any kind, x_stride bytes apart: out[i] = x[index[i]], and its inverse out[index[i]] = x[i].
// `out` is contiguous.
void gather_rows(Team& team, const void* x, int64_t x_stride, int64_t row_bytes,
                 const int32_t* index, int64_t rows, void* out);
void scatter_rows(Team& team, const void* x, int64_t x_stride, int64_t row_bytes,
                  const int32_t* index, int64_t rows, void* out);

}  // namespace aserve
