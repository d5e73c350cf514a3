// The interface of Python and the extension through ctypes. On import Python sets the shaders'
// text, the function that runs them in the simulator, and the GPU.
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
  METAL_ATTN_TF32_BY_SETTING = -1,  // as TORCH_METAL_ATTN_TF32 says
  METAL_ATTN_TF32_REFUSED = 0,
  METAL_ATTN_TF32_ALLOWED = 1,
};

// A program of the simulator. There is one for each family and defines, until the process ends.
struct SimulatedProgram {
  const char* family = nullptr;
  const char* defines = nullptr;  // NAME=VALUE, one on each line
};

// Compiles and runs one dispatch, and may change `buffers`. The outcome is written to *status, not
// returned: if Python is interrupted before its first line, ctypes returns an arbitrary value.
typedef void (*metal_attn_simulate)(const SimulatedProgram* program, const char* kernel,
                                    SimulatorBuffer* buffers, uint32_t count,
                                    const uint32_t threadgroups[3],
                                    const uint32_t threads_per_threadgroup[3], int32_t* status);

// The flattened Metal text of a family, without defines; copied.
__attribute__((visibility("default"))) void metal_attn_set_shader_text(const char* family,
                                                                       const char* text);
__attribute__((visibility("default"))) void metal_attn_set_simulator(metal_attn_simulate callback);
// An op of the thread begins (1) or has ended (0). The simulator's checks know that its allocations
// are uninitialised. Ops nest. Nothing is known of allocations outside of ops.
__attribute__((visibility("default"))) void metal_attn_track_fresh(int32_t begins);
// Keeps a buffer's tensor, and with it its memory, until it is released: for recordings.
__attribute__((visibility("default"))) void* metal_attn_hold_tensor(const void* tensor);
__attribute__((visibility("default"))) void metal_attn_release_tensor(void* held);
__attribute__((visibility("default"))) void metal_attn_set_gpu_name(const char* name);
__attribute__((visibility("default"))) void metal_attn_set_gpu_cores(int cores);
// Besides the GPU, tensor tiles depend on these: 1 if macOS is 26.2 or later, and the file that
// notes that an earlier process compared both kinds of tile, "" if it can be nowhere.
__attribute__((visibility("default"))) void metal_attn_set_tensor_record(int32_t macos_suffices,
                                                                         const char* path);
// Why attention, or its backward, uses 8x8 tiles in half precision or in float32, in one line; ""
// if it uses tensor tiles. on_mps: on mps, and else in the simulator.
__attribute__((visibility("default"))) const char* metal_attn_tensor_tiles_problem(int32_t on_mps,
                                                                                   int32_t backward,
                                                                                   int32_t float32);
// Allows or refuses TF32 for float32 from now on, in all threads: a MetalAttnTf32. Returns the
// value before.
__attribute__((visibility("default"))) int32_t metal_attn_allow_tf32(int32_t allowed);
// 1 if TF32 is allowed, 0 if not; -1 if the setting is wrong.
__attribute__((visibility("default"))) int32_t metal_attn_tf32_allowed();
// The reason in words: "TF32 is not allowed", the setting that allows it, or its error.
__attribute__((visibility("default"))) const char* metal_attn_tf32_reason();
// Why mps cannot be used in this process, in one line; "" if it can. On macOS only.
__attribute__((visibility("default"))) const char* metal_attn_mps_problem();
// If 1, the ops of metal_attn_explain compile for mps, in this thread, the kernels that they
// report. Only where mps has no problem. On macOS only.
__attribute__((visibility("default"))) void metal_attn_compile_recorded(int32_t compiles);

}  // extern "C"

namespace metal_attn {

// Throws std::runtime_error if there is none.
std::string shader_text(const std::string& family);

// "" if nobody knows.
std::string gpu_name();

// As set by metal_attn_set_gpu_name and metal_attn_set_gpu_cores.
Gpu gpu();

struct TensorRecord {
  bool macos_suffices = false;
  std::string path;
};

// As set by metal_attn_set_tensor_record.
TensorRecord tensor_record();

// Throws std::runtime_error if there is none.
metal_attn_simulate simulate_callback();

}  // namespace metal_attn
