// Which instruction set the kernels use: found at load, lowered by ASERVE_CPU or set_level.
#pragma once

namespace aserve {

enum class Level { generic = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best level this processor and kernel allow. Asks once for AMX state, so it may be called late.
Level level_max();
Level level();
// Clamped to level_max(); returns the level now in force. Not to be called while kernels run.
Level set_level(Level wanted);
const char* level_name(Level level);
// False if the name is unknown.
bool level_from_name(const char* name, Level* level);

}  // namespace aserve
