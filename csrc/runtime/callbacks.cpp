#include "csrc/runtime/callbacks.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>

namespace {

struct Texts {
  std::mutex mutex;
  std::map<std::string, std::string> by_family;
  std::string gpu_name;
  metal_attn::TensorRecord tensor_record;
};

// Never destroyed: threads may still launch at exit.
Texts& texts() {
  static Texts* const texts = new Texts;
  return *texts;
}

std::atomic<metal_attn_simulate> g_simulate{nullptr};

// GPUs have 7 to 80 cores. Too many splits of a decode cost little, and too few leave cores idle.
std::atomic<int> g_gpu_cores{40};
std::atomic<int> g_gpu_family{metal_attn::gpu_family("")};

}  // namespace

void metal_attn_set_shader_text(const char* family, const char* text) {
  const std::lock_guard lock(texts().mutex);
  texts().by_family[family] = text;
}

void metal_attn_set_simulator(metal_attn_simulate callback) { g_simulate = callback; }

void metal_attn_set_gpu_name(const char* name) {
  const std::lock_guard lock(texts().mutex);
  texts().gpu_name = name;
  g_gpu_family = metal_attn::gpu_family(name);
}

void metal_attn_set_tensor_record(int32_t macos_suffices, const char* path) {
  const std::lock_guard lock(texts().mutex);
  texts().tensor_record = {macos_suffices != 0, path};
}

// cores: 0 if torch does not know the number.
void metal_attn_set_gpu_cores(int cores) {
  if (cores > 0) { g_gpu_cores = cores; }
}

namespace metal_attn {

std::string gpu_name() {
  const std::lock_guard lock(texts().mutex);
  return texts().gpu_name;
}

TensorRecord tensor_record() {
  const std::lock_guard lock(texts().mutex);
  return texts().tensor_record;
}

Gpu gpu() { return {g_gpu_family, g_gpu_cores}; }

std::string shader_text(const std::string& family) {
  const std::lock_guard lock(texts().mutex);
  const auto entry = texts().by_family.find(family);
  if (entry == texts().by_family.end()) {
    throw std::runtime_error(
        "metal_attn: no shader text for the family '" + family +
        "'; import torch_metal_attn, which sets the texts on a machine with mps");
  }
  return entry->second;
}

metal_attn_simulate simulate_callback() {
  const metal_attn_simulate callback = g_simulate.load();
  if (callback == nullptr) {
    throw std::runtime_error("metal_attn: the simulator is not set; import torch_metal_attn first");
  }
  return callback;
}

}  // namespace metal_attn
