#include "aserve/memory.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "aserve/index.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace aserve {
namespace {

constexpr int64_t small_page = 4096, huge_page = int64_t{2} << 20;
constexpr int64_t stretch_bytes = int64_t{32} << 20;

}  // namespace

void FreeMemory::operator()(void* p) const { std::free(p); }

Memory take_memory(int64_t* bytes) {
  const int64_t page = *bytes >= huge_page / 2 ? huge_page : small_page;
  *bytes = std::max<int64_t>(1, ceil_div(*bytes, page)) * page;
  Memory made(std::aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(*bytes)));
  if (!made) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // Only a wish: a kernel without huge pages says no, and nothing else changes.
  if (page == huge_page) madvise(made.get(), static_cast<size_t>(*bytes), MADV_HUGEPAGE);
#endif
  return made;
}

std::shared_ptr<void> Arena::take(int64_t bytes) {
  const int64_t rounded = ceil_div(std::max<int64_t>(1, bytes), small_page) * small_page;
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<void> stretch = stretch_.lock();
  if (!stretch || left_ < rounded) {
    // What is left of the stretch before was never touched, so it costs no memory.
    int64_t length = std::max(rounded, stretch_bytes);
    stretch = take_memory(&length);
    stretch_ = stretch;
    next_ = static_cast<char*>(stretch.get());
    left_ = length;
  }
  char* piece = next_;
  next_ += rounded;
  left_ -= rounded;
  return {stretch, piece};
}

}  // namespace aserve
