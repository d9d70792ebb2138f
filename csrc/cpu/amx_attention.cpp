#if defined(__x86_64__)
#include "kernels.h"
namespace aserve {
bool amx_attention_fits(const Attention&) { return false; }
void amx_attention(const AttentionTask&) {}
}
#endif
