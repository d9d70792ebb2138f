#if defined(__x86_64__)
#include "kernels.h"
namespace aserve {
void amx_linear(Team&, const Weight&, const float*, int64_t, float*) {}
bool amx_attention_fits(const Attention&) { return false; }
void amx_attention(const AttentionTask&) {}
}
#endif
