// What the extension asks of the Python package: the shaders' text, to run one in the simulator,
// and how many cores the GPU has. The package sets them through ctypes when it is imported.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/simulator/engine.h"

extern "C" {

// The flattened Metal text of a family, without defines; null if Python raised.
typedef const char* (*metal_attn_shader_source)(const char* family);

// Compiles and runs one dispatch. `defines` holds a NAME=VALUE a line. 0: done; else Python keeps
// the exception and raises it once the op has returned with an error.
typedef int (*metal_attn_simulate)(const char* family, const char* kernel, const char* defines,
                                   const SimulatorBuffer* buffers, uint32_t count,
                                   const uint32_t threadgroups[3],
                                   const uint32_t threads_per_threadgroup[3]);

// Returns the callback it replaces.
__attribute__((visibility("default"))) metal_attn_shader_source
metal_attn_set_shader_source(metal_attn_shader_source callback);
__attribute__((visibility("default"))) void metal_attn_set_simulator(metal_attn_simulate callback);
__attribute__((visibility("default"))) void metal_attn_set_gpu_cores(int cores);

}  // extern "C"

namespace metal_attn {

// Throws std::runtime_error if there is no callback or it has no text.
std::string shader_source(const std::string& family);

// Those of the smallest GPUs of a Mac if nobody knows.
int gpu_cores();

// Throws std::runtime_error if there is none.
metal_attn_simulate simulate_callback();

}  // namespace metal_attn
