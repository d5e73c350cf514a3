#include "csrc/runtime/fresh.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/torch_call.h"

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
thread_local std::vector<std::size_t> t_ops;  // for each running op, t_fresh's size when it began

}  // namespace

void metal_attn_track_fresh(int32_t begins) {
  if (begins != 0) {
    t_ops.push_back(t_fresh.size());
  } else if (!t_ops.empty()) {
    while (t_fresh.size() > t_ops.back()) { t_fresh.pop_back(); }
    t_ops.pop_back();
  }
}

namespace metal_attn {

void remember_fresh(const Tensor& tensor) {
  if (t_ops.empty()) { return; }
  int64_t bytes = 0;
  TORCH_CALL(aoti_torch_get_storage_size(tensor.get(), &bytes));
  if (bytes > 0) {
    const void* storage = tensor.const_data_ptr();
    for (Fresh& freed : t_fresh) {
      if (freed.storage == storage) {
        freed.storage = nullptr;  // this tensor reuses the memory; t_ops still counts the entry
      }
    }
    t_fresh.push_back({storage, static_cast<std::size_t>(bytes), nullptr});
  }
}

uint8_t* initialised_bytes(const void* storage) {
  if (storage == nullptr) { return nullptr; }
  for (Fresh& fresh : t_fresh) {
    if (fresh.storage != storage) { continue; }
    if (fresh.initialised == nullptr) {
      fresh.initialised.reset(static_cast<uint8_t*>(std::calloc(fresh.bytes, 1)));
      if (fresh.initialised == nullptr) { throw std::bad_alloc(); }
    }
    return fresh.initialised.get();
  }
  return nullptr;
}

}  // namespace metal_attn
