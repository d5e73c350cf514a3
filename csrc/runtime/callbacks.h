// The functions that Python calls through ctypes. On import Python sets the shaders' texts, the
// function that runs them in the simulator, and the GPU.
#pragma once

#include "csrc/problem/gpu.h"
#include "csrc/simulator/engine.h"

extern "C" {

enum MetalAttnSimulated : int32_t {
  METAL_ATTN_NOT_BEGUN = -1,  // the value of *status before the call
  METAL_ATTN_DONE = 0,
  METAL_ATTN_RAISED = 1,  // Python keeps the exception and raises it once the op has returned
};

enum MetalAttnTf32 : int32_t {
  METAL_ATTN_TF32_BY_SETTING = -1,  // TORCH_METAL_ATTN_TF32 decides
  METAL_ATTN_TF32_REFUSED = 0,
  METAL_ATTN_TF32_ALLOWED = 1,
};

// A program of the simulator, for one family and one list of defines. Never destroyed.
struct SimulatedProgram {
  const char* family = nullptr;
  const char* defines = nullptr;  // NAME=VALUE, one on each line
};

// Compiles and runs one dispatch, and may change `buffers`. Writes the outcome to *status, because
// ctypes returns an arbitrary value if the Python function is interrupted before its first line.
typedef void (*metal_attn_simulate)(const SimulatedProgram* program, const char* kernel,
                                    SimulatorBuffer* buffers, uint32_t count,
                                    const uint32_t threadgroups[3],
                                    const uint32_t threads_per_threadgroup[3], int32_t* status);

// Copies the flattened Metal text of a family, which has no defines.
__attribute__((visibility("default"))) void metal_attn_set_shader_text(const char* family,
                                                                       const char* text);
__attribute__((visibility("default"))) void metal_attn_set_simulator(metal_attn_simulate callback);
// Called when an op of the thread begins (1) and when it has ended (0). Ops nest. The simulator's
// checks treat the op's allocations as uninitialised.
__attribute__((visibility("default"))) void metal_attn_track_fresh(int32_t begins);
// Keeps a buffer's tensor and its memory alive until it is released, for recordings.
__attribute__((visibility("default"))) void* metal_attn_hold_tensor(const void* tensor);
__attribute__((visibility("default"))) void metal_attn_release_tensor(void* held);
__attribute__((visibility("default"))) void metal_attn_set_gpu_name(const char* name);
__attribute__((visibility("default"))) void metal_attn_set_gpu_cores(int cores);
// macos_suffices: 1 if macOS is 26.2 or later. path: the file that records a comparison of tensor
// tiles by an earlier process, or "" if there is no folder for the file.
__attribute__((visibility("default"))) void metal_attn_set_tensor_record(int32_t macos_suffices,
                                                                         const char* path);
// The reason in one line why attention or its backward uses 8x8 tiles in half precision or float32,
// or "" if it uses tensor tiles. on_mps: 1 on mps, 0 in the simulator.
__attribute__((visibility("default"))) const char* metal_attn_tensor_tiles_problem(int32_t on_mps,
                                                                                   int32_t backward,
                                                                                   int32_t float32);
// Sets a MetalAttnTf32 for all threads, and returns the previous one.
__attribute__((visibility("default"))) int32_t metal_attn_allow_tf32(int32_t allowed);
// 1 if TF32 is allowed, 0 if not, -1 if the setting is invalid.
__attribute__((visibility("default"))) int32_t metal_attn_tf32_allowed();
// "TF32 is not allowed", the setting that allows it, or the error of an invalid setting.
__attribute__((visibility("default"))) const char* metal_attn_tf32_reason();
// The reason in one line why this process cannot use mps, or "". On macOS only.
__attribute__((visibility("default"))) const char* metal_attn_mps_problem();
// If 1, the ops of metal_attn_explain in this thread also compile their kernels for mps, which must
// have no problem. On macOS only.
__attribute__((visibility("default"))) void metal_attn_compile_recorded(int32_t compiles);

}  // extern "C"

namespace metal_attn {

// Throws std::runtime_error if no text is set.
std::string shader_text(const std::string& family);

// "" if no name is set.
std::string gpu_name();

Gpu gpu();

struct TensorRecord {
  bool macos_suffices = false;
  std::string path;
};

TensorRecord tensor_record();

// Throws std::runtime_error if no callback is set.
metal_attn_simulate simulate_callback();

}  // namespace metal_attn
