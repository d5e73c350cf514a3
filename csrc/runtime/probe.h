// Trials of mps and of its tensor operations: on virtual Macs, mps cannot allocate or gives zeros.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/runtime/backend.h"

namespace metal_attn {

struct ProbeSettings {
  int32_t device_type;                    // torch's number
  std::chrono::milliseconds limit;        // of a trial
  std::chrono::milliseconds queue_limit;  // of the work that was queued before the trial
  std::shared_ptr<const void> note;       // kept until the trial has ended, even after the limit
};

ProbeSettings probe_settings();

// Runs `trial` in a new thread. Returns its result, its error, or that `name` did not end in time.
// The time begins when the device has done its queued work. The thread is needed because the trial
// may hang, and because modes of the caller's thread, such as torch's fake tensors, must not affect
// its allocations. The trial must own all that it uses, except `mps`, which is never destroyed.
std::string try_in_thread(const ProbeSettings& settings, const char* name,
                          std::function<std::string()> trial);

// Copies `values` to the device, runs the kernel of `program`, which has one SIMD group and its
// family's name, and passes the results to `compare`. Returns the result of `compare`, or the full
// reason why the kernel did not run.
std::string probe_values(Backend& mps, const ProbeSettings& settings, const Program& program,
                         std::vector<float> values,
                         std::function<std::string(const std::vector<float>&)> compare);

// The reason in one line not to use `mps`, or "". Checks the GPU's name, allocates on the device
// and compares the results of shaders/probe.metal.
std::string probe(Backend& mps, const ProbeSettings& settings);

// The result of `probe_tensor` for a language without tensor operations. It needs no warning.
inline constexpr char kNoTensorLanguage[] =
    "torch compiles a version of Metal before 4.0, which has no tensor operations";

// The reason in one line not to use tensor tiles, or "". Compares the layout of operands in
// shaders/probe_tensor.metal with the tables in shaders/tensor_tile.h, and compares products.
// float32: tries float32 operands instead of half precision.
std::string probe_tensor(Backend& mps, const ProbeSettings& settings, bool float32);

}  // namespace metal_attn
