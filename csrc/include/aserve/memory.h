// Memory for what is read again and again: in huge pages where it is long enough, for a weight that is
// read once a step in pages of 4 KiB waits more for their addresses than for itself.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace aserve {

struct FreeMemory {
  void operator()(void* p) const;
};
using Memory = std::unique_ptr<void, FreeMemory>;

// At least `*bytes`, which becomes what there is; 64-byte aligned. Throws std::bad_alloc.
Memory take_memory(int64_t* bytes);

// Hands out pieces of long stretches, each kept until the last of its pieces is gone. Pieces begin on
// a boundary of 4 KiB. Any thread may ask.
class Arena {
 public:
  std::shared_ptr<void> take(int64_t bytes);

 private:
  std::mutex mutex_;
  std::weak_ptr<void> stretch_;  // the one in use
  char* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace aserve
