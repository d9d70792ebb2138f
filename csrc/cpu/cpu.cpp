#include "aserve/cpu.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace aserve {
namespace {

const char* const names[] = {"generic", "avx2", "avx512", "amx"};

#if defined(__x86_64__)
// AMX state is off until a process asks for it; some kernels and sandboxes refuse.
bool amx_allowed() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d >> 24 & 1, bf16 = d >> 22 & 1;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
  const bool avx512_bf16 = a >> 5 & 1;
  return tile && bf16 && avx512_bf16 && amx_allowed();
}

Level find() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (!avx2) return Level::generic;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Level::avx2;
  return has_amx() ? Level::amx : Level::avx512;
}
#else
Level find() { return Level::generic; }
#endif

Level first() {
  Level wanted = level_max();
  const char* name = std::getenv("ASERVE_CPU");
  if (name != nullptr) level_from_name(name, &wanted);
  return wanted < level_max() ? wanted : level_max();
}

Level& in_force() {
  static Level level = first();
  return level;
}

}  // namespace

Level level_max() {
  static const Level best = find();
  return best;
}

Level level() { return in_force(); }

Level set_level(Level wanted) {
  in_force() = wanted < level_max() ? wanted : level_max();
  return in_force();
}

const char* level_name(Level level) { return names[static_cast<int>(level)]; }

bool level_from_name(const char* name, Level* level) {
  for (int i = 0; i < 4; ++i) {
    if (std::strcmp(name, names[i]) == 0) {
      *level = static_cast<Level>(i);
      return true;
    }
  }
  return false;
}

}  // namespace aserve
