// Backends run a Launch on PyTorch's MPS stream, or on the CPU in the simulator.
#pragma once

#include "csrc/runtime/launch.h"

namespace metal_attn {

// A kernel does not compile, or the GPU cannot run it. what() is `why` and asks for a report.
struct CompileError : std::runtime_error {
  explicit CompileError(const std::string& why);

  const std::string why;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Enqueues (mps) or completes (simulator) the dispatch. Throws CompileError, or another
  // std::runtime_error if the device refuses it.
  virtual void run(const Launch& launch) = 0;

  // Compiles the launch's kernel. Returns true if it was not compiled before. Throws CompileError.
  virtual bool compile(const Launch&) { return false; }

  virtual bool is_gpu() const { return false; }

  // True if the backend records launches and runs nothing: csrc/ops/common/recorder.h.
  virtual bool records() const { return false; }
};

// The backend that compiles the kernels of this thread's recorded launches. Null: no compilation.
Backend*& compiler_of_recorded();

Backend& simulator_backend();

// Linked on macOS only. The first call tests mps. Throws std::runtime_error if mps computes wrong
// results, and in the child of a fork.
Backend& mps_backend();
Backend& unprobed_mps_backend();

}  // namespace metal_attn
