#include "csrc/runtime/fresh.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "csrc/runtime/callbacks.h"

namespace {

struct Free {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};

struct Fresh {
  const void* storage;
  std::size_t bytes;
  std::unique_ptr<uint8_t, Free> initialised;  // allocated when a kernel gets the tensor
};

thread_local std::vector<Fresh> t_fresh;

}  // namespace

void metal_attn_forget_fresh() { t_fresh.clear(); }

namespace metal_attn {

void remember_fresh(const torch::stable::Tensor& tensor) {
  int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  if (bytes > 0) {
    // Of a tensor that is gone, another may have the memory.
    const void* storage = tensor.const_data_ptr();
    std::erase_if(t_fresh, [&](const Fresh& fresh) { return fresh.storage == storage; });
    t_fresh.push_back({storage, static_cast<std::size_t>(bytes), nullptr});
  }
}

uint8_t* initialised_bytes(const void* storage) {
  for (Fresh& fresh : t_fresh) {
    if (fresh.storage != storage) {
      continue;
    }
    if (fresh.initialised == nullptr) {
      fresh.initialised.reset(static_cast<uint8_t*>(std::calloc(fresh.bytes, 1)));
      if (fresh.initialised == nullptr) {
        throw std::bad_alloc();
      }
    }
    return fresh.initialised.get();
  }
  return nullptr;
}

}  // namespace metal_attn
