// Signals that a kernel's code raises end its threadgroup and not the process.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct Worker;

// While it lives, handles the signals of invalid memory accesses, divisions and instructions, and
// kStopSignal. Those of other threads go to the previous handlers.
class SignalHandlers {
 public:
  SignalHandlers();
  ~SignalHandlers();
};

// Makes the calling thread the worker's: signals of its fibers stop them, and it blocks all others.
void guard_thread(Worker& worker);

// Sent to a worker's thread, it stops the fiber if that is in the kernel's code.
extern const int kStopSignal;

// The addresses of machine code in the image that holds `function`.
struct CodeRange {
  uintptr_t begin = 0, end = 0;
};
CodeRange code_around(const void* function);

}  // namespace metal_attn::simulator
