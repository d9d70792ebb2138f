// Compiling a stretch of a file for instructions that not every processor has. What stands between
// begin and end must be static, so that nothing of it is merged with code that runs elsewhere; and
// headers of the standard library come before, for the same reason.
#pragma once

#define ASERVE_TARGET_AVX2 "avx2,fma,f16c"
#define ASERVE_TARGET_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#define ASERVE_TARGET_AMX "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"

#define ASERVE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ASERVE_TARGET_BEGIN(features) \
  ASERVE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ASERVE_TARGET_END ASERVE_PRAGMA(clang attribute pop)
#else
#define ASERVE_TARGET_BEGIN(features) \
  ASERVE_PRAGMA(GCC push_options)     \
  ASERVE_PRAGMA(GCC target(features))
#define ASERVE_TARGET_END ASERVE_PRAGMA(GCC pop_options)
#endif
