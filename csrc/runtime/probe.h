// Whether mps computes: virtual Macs have an mps that allocates nothing or computes zeros.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "csrc/runtime/backend.h"

namespace metal_attn {

struct ProbeSettings {
  int32_t device_type;  // torch's
  std::chrono::milliseconds limit;
};

// Why `mps` is not to be used, in one line; "" if it computes. Looks at the GPU's name, allocates
// on the device and compares what shaders/probe.metal wrote. What takes longer than the limit is
// left running, so `mps` must live until the process ends.
std::string probe(Backend& mps, const ProbeSettings& settings);

}  // namespace metal_attn
