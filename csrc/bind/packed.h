// A packed weight as Python holds it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "aserve/linear.h"

namespace aserve {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// A weight with the memory it lives in.
struct Packed {
  Weight weight;
  std::unique_ptr<void, Free> memory;
  std::vector<float> bias;
  int64_t nbytes() const {
    return weight.packed_bytes() + static_cast<int64_t>(bias.size() * sizeof(float));
  }
};

}  // namespace aserve
