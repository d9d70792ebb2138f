// Parts of an attention block that draft heads take too. Private to csrc/cpu.
#pragma once

#include "aserve/block.h"

namespace aserve {

// q, k and v of rows that are normed already, in the workspace: k and v are written to their slots.
float* project_rows(Team& team, Workspace& space, const AttentionBlock& b, const BlockStep& step,
                    const KvPages& pages, const float* normed);

// Of q that lies as project_rows leaves it.
Attention attention_call(const AttentionBlock& b, const BlockStep& step, const KvPages& pages,
                         const float* qkv, float* out);

}  // namespace aserve
