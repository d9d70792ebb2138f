// What this machine can do at most, for benchmarks: a plain read of memory, and products of tiles that
// never leave the registers. No kernel can beat them.
#pragma once

#include <cstdint>

#include "aserve/team.h"

namespace aserve {

// Reads `bytes` at `data` once with all threads of the team; 64-byte aligned, a multiple of 64.
// Answers a sum over the words, so that the reads are made.
uint64_t probe_read(Team& team, const void* data, int64_t bytes);

// Each thread does `rounds` times four products of bfloat16 tiles. Answers the multiplications and
// additions done: 0 if the level in force has no tiles.
int64_t probe_products(Team& team, int64_t rounds);

}  // namespace aserve
