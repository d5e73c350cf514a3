// Runs a Launch: on PyTorch's MPS stream, or on the CPU in the simulator.
#pragma once

#include "csrc/runtime/launch.h"

namespace metal_attn {

// The text of a kernel does not compile, or the GPU cannot run what it compiles to. what() adds to
// `why` where to report it.
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

  // Compiles a launch's kernel, and runs nothing. Returns whether nobody had. Throws CompileError.
  virtual bool compile(const Launch&) { return false; }

  // True for a GPU, whose abilities a probe must find out.
  virtual bool is_gpu() const { return false; }

  // True if launches are kept instead of run: csrc/ops/common/recorder.h.
  virtual bool records() const { return false; }
};

// The backend that compiles the kernel of each launch that recorders of this thread keep. They note
// if the kernel was new. Null: nothing is compiled.
Backend*& compiler_of_recorded();

Backend& simulator_backend();

// Linked on macOS only. The first call tries whether mps computes; throws std::runtime_error if it
// does not, and in the child of a fork.
Backend& mps_backend();
Backend& unprobed_mps_backend();

}  // namespace metal_attn
