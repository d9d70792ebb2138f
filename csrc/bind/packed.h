// A packed weight as Python holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "aserve/linear.h"

namespace aserve {

// A weight with the memory it lives in.
struct Packed {
  Weight weight;
  std::shared_ptr<void> memory;  // a piece of what weights share
  std::vector<float> bias;
  int64_t nbytes() const {
    return weight.packed_bytes() + static_cast<int64_t>(bias.size() * sizeof(float));
  }
};

}  // namespace aserve
