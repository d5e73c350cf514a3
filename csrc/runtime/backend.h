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

// Linked on macOS only. The first call tries whether mps computes; throws std::runtime_error if it
// does not, and in the child of a fork.
Backend& mps_backend();
Backend& untried_mps_backend();

}  // namespace metal_attn
