// Trials of mps and of its tensor operations: virtual Macs have an mps that allocates nothing
// or computes zeros.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/runtime/backend.h"

namespace metal_attn {

struct ProbeSettings {
  int32_t device_type;                        // torch's
  std::chrono::milliseconds limit;            // of a trial
  std::chrono::milliseconds limit_of_others;  // of the work that was queued before it
  std::shared_ptr<const void> held;           // until the trial has ended, be it after the limit
};

ProbeSettings probe_settings();

// What `trial` returns, what it threw, or that `what` did not end in time, which begins once the
// device has done what torch had queued before. It runs in a thread of its own: it may hang, and no
// mode of the caller's thread, such as torch's fake tensors, reaches what it allocates. So it must
// own what it uses, and so on `mps`, which must live until the process ends.
std::string try_apart(const ProbeSettings& settings, const char* what,
                      std::function<std::string()> trial);

// Runs the kernel of `program`, of one SIMD group and named as its family, on `values` in the
// device's memory, and gives the values after it to `compare`; returns what that says, or why the
// kernel did not run, in full.
std::string probe_values(Backend& mps, const ProbeSettings& settings, const Program& program,
                         std::vector<float> values,
                         std::function<std::string(const std::vector<float>&)> compare);

// Why `mps` is not to be used, in one line; "" if it computes. Looks at the GPU's name, allocates
// on the device and compares what shaders/probe.metal wrote. What takes longer than the limit is
// left running, so `mps` must live until the process ends.
std::string probe(Backend& mps, const ProbeSettings& settings);

// What `probe_tensor` says of a language that has no tensor operations. Nobody needs to be warned
// of that.
inline constexpr char kNoTensorLanguage[] =
    "torch compiles a version of Metal before 4.0, which has no tensor operations";

// Why tensor tiles cannot be used, in one line; "" if they can. Compares what
// shaders/probe_tensor.metal wrote with the tables in shaders/tensor_tile.h, slot by slot, and its
// products. float32: of float32 operands alone, or of those in half precision.
std::string probe_tensor(Backend& mps, const ProbeSettings& settings, bool float32);

}  // namespace metal_attn
