// Runs a Launch: on PyTorch's MPS stream, or on the CPU in the simulator.
#pragma once

#include "csrc/runtime/launch.h"

namespace metal_attn {

class Backend {
 public:
  virtual ~Backend() = default;

  // Enqueues (mps) or completes (simulator) the dispatch. Throws std::runtime_error if the kernel
  // does not compile or the device refuses it.
  virtual void run(const Launch& launch) = 0;
};

Backend& simulator_backend();
Backend& mps_backend();  // linked on macOS only

}  // namespace metal_attn
