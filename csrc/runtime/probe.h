// Whether mps computes: virtual Macs have an mps that allocates nothing or computes zeros.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/runtime/backend.h"

namespace metal_attn {

struct ProbeSettings {
  int32_t device_type;  // torch's
  std::chrono::milliseconds limit;
};

ProbeSettings probe_settings();

// What `trial` returns, what it threw, or that it did not end in time. It runs in a thread of its
// own: it may hang, and no mode of the caller's thread, such as torch's fake tensors, reaches what
// it allocates. So it must own what it uses, and so on `mps`, which must live until the process
// ends.
std::string try_apart(std::chrono::milliseconds limit, std::function<std::string()> trial);

// Runs the kernel `family`, of one SIMD group, on `values` in the device's memory, and gives the
// values after it to `compare`; returns what that says, or why the kernel did not run, in full.
std::string probe_values(Backend& mps, const ProbeSettings& settings, const char* family,
                         std::vector<float> values,
                         std::function<std::string(const std::vector<float>&)> compare);

// Why `mps` is not to be used, in one line; "" if it computes. Looks at the GPU's name, allocates
// on the device and compares what shaders/probe.metal wrote. What takes longer than the limit is
// left running, so `mps` must live until the process ends.
std::string probe(Backend& mps, const ProbeSettings& settings);

}  // namespace metal_attn
