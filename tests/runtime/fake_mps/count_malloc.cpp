// Preloaded into a process: counts the allocations of each thread (glibc only), and the tensors
// that torch makes for the thread.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

// torch is in no scope that RTLD_NEXT searches.
template <typename Function>
static Function* of_torch(Function*, const char* name) {
  return reinterpret_cast<Function*>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), name));
}

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

static thread_local uint64_t empty = 0;
static thread_local uint64_t views = 0;

uint64_t counted_empty() { return empty; }
uint64_t counted_views() { return views; }

// torch's functions of these names, whose tensors are opaque here.
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t device, int32_t index, void** tensor) {
  ++empty;
  static auto* const torchs = of_torch(&aoti_torch_empty_strided, "aoti_torch_empty_strided");
  return torchs(ndim, sizes, strides, dtype, device, index, tensor);
}

int32_t aoti_torch__reinterpret_tensor(void* tensor, int64_t ndim, const int64_t* sizes,
                                       const int64_t* strides, int64_t offset, void** view) {
  ++views;
  static auto* const torchs =
      of_torch(&aoti_torch__reinterpret_tensor, "aoti_torch__reinterpret_tensor");
  return torchs(tensor, ndim, sizes, strides, offset, view);
}

}  // extern "C"
