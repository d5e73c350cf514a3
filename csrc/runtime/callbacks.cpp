#include "csrc/runtime/callbacks.h"

#include <atomic>
#include <stdexcept>

namespace {

std::atomic<metal_attn_shader_source> g_shader_source{nullptr};
std::atomic<metal_attn_simulate> g_simulate{nullptr};

// The smallest have 7 to 10.
std::atomic<int> g_gpu_cores{8};

}  // namespace

metal_attn_shader_source metal_attn_set_shader_source(metal_attn_shader_source callback) {
  return g_shader_source.exchange(callback);
}

void metal_attn_set_simulator(metal_attn_simulate callback) { g_simulate = callback; }

void metal_attn_set_gpu_cores(int cores) { g_gpu_cores = cores; }

namespace metal_attn {

int gpu_cores() { return g_gpu_cores; }

std::string shader_source(const std::string& family) {
  const metal_attn_shader_source callback = g_shader_source.load();
  if (callback == nullptr) {
    throw std::runtime_error("metal_attn: no shader text is set; import torch_metal_attn first");
  }
  const char* text = callback(family.c_str());
  if (text == nullptr) {
    throw std::runtime_error("metal_attn: no shader text for the family '" + family + "'");
  }
  return text;
}

metal_attn_simulate simulate_callback() {
  const metal_attn_simulate callback = g_simulate.load();
  if (callback == nullptr) {
    throw std::runtime_error("metal_attn: the simulator is not set; import torch_metal_attn first");
  }
  return callback;
}

}  // namespace metal_attn
