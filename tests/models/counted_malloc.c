// Preloaded into a process: counts what is allocated while it is told to.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_int counts;
static atomic_long n_calls, n_bytes;

void counted_start(void) {
  n_calls = n_bytes = 0;
  counts = 1;
}

long counted_stop(void) {
  counts = 0;
  return n_bytes;
}

long counted_calls(void) { return n_calls; }

static void* counted(size_t size, void* got) {
  if (counts) {
    ++n_calls;
    n_bytes += (long)size;
  }
  return got;
}

void* malloc(size_t size) { return counted(size, __libc_malloc(size)); }
void* calloc(size_t n, size_t size) { return counted(n * size, __libc_calloc(n, size)); }
void* realloc(void* old, size_t size) { return counted(size, __libc_realloc(old, size)); }
void* memalign(size_t at, size_t size) { return counted(size, __libc_memalign(at, size)); }
void* aligned_alloc(size_t at, size_t size) { return counted(size, __libc_memalign(at, size)); }
int posix_memalign(void** got, size_t at, size_t size) {
  *got = counted(size, __libc_memalign(at, size));
  return *got ? 0 : ENOMEM;
}
