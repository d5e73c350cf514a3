// Preloaded into a process: counts what each thread allocates, by new or otherwise (glibc only).
#include <cstddef>
#include <cstdint>

extern "C" {

void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);

static thread_local uint64_t allocations = 0;

uint64_t counted_allocations() { return allocations; }

void* malloc(std::size_t size) {
  ++allocations;
  return __libc_malloc(size);
}

void* calloc(std::size_t count, std::size_t size) {
  ++allocations;
  return __libc_calloc(count, size);
}

void* realloc(void* memory, std::size_t size) {
  ++allocations;
  return __libc_realloc(memory, size);
}

}  // extern "C"
