// Trials of mps and of its tensor operations: virtual Macs have an mps that allocates nothing
// or computes zeros.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/runtime/backend.h"

namespace metal_attn {

struct ProbeSettings {
  int32_t device_type;                        // torch's
  std::chrono::milliseconds limit;            // of a trial
  std::chrono::milliseconds limit_of_others;  // of the work that was queued before it
  std::shared_ptr<const void> held;           // until the trial has ended, even after the limit
};

ProbeSettings probe_settings();

// Returns the result of `trial`, its error, or that `what` did not end in time. The time begins
// once the device has done torch's earlier work. The trial has its own thread: it may hang, and
// modes of the caller's thread, such as torch's fake tensors, must not reach its allocations. It
// owns all that it uses but `mps`, which must live until the process ends.
std::string try_apart(const ProbeSettings& settings, const char* what,
                      std::function<std::string()> trial);

// Runs the kernel of `program`, of one SIMD group and named as its family, on `values` in the
// device's memory, and passes the results to `compare`. Returns its answer, or the full reason why
// the kernel did not run.
std::string probe_values(Backend& mps, const ProbeSettings& settings, const Program& program,
                         std::vector<float> values,
                         std::function<std::string(const std::vector<float>&)> compare);

// The reason not to use `mps`, in one line; "" if it computes. Checks the GPU's name, allocates on
// the device and compares the results of shaders/probe.metal. A trial that exceeds the limit is
// left running, so `mps` must live until the process ends.
std::string probe(Backend& mps, const ProbeSettings& settings);

// The result of `probe_tensor` for a language without tensor operations, which needs no warning.
inline constexpr char kNoTensorLanguage[] =
    "torch compiles a version of Metal before 4.0, which has no tensor operations";

// The reason not to use tensor tiles, in one line; "" if they work. Compares the results of
// shaders/probe_tensor.metal with the tables in shaders/tensor_tile.h, slot by slot, and its
// products. float32: tries float32 operands, and otherwise those in half precision.
std::string probe_tensor(Backend& mps, const ProbeSettings& settings, bool float32);

}  // namespace metal_attn
