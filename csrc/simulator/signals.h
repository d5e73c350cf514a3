// Nothing that a kernel's code does ends the process: a signal that it raises ends its threadgroup.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct Worker;

// Handles the signals of wrong memory accesses, divisions and instructions, and the one that stops
// a worker, while it lives. Those of other threads go to the handlers that were there before.
class SignalHandlers {
 public:
  SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;
  ~SignalHandlers();
};

// Makes the calling thread the worker's: its fibers' signals stop them, and all others are left to
// the process's other threads.
void guard_thread(Worker& worker);

// Sent to a worker's thread, stops its fiber if that runs the kernel's own code at the moment.
extern const int kStopSignal;

// The addresses of the kernel's machine code: of the image that holds `function`.
struct CodeRange {
  uintptr_t begin = 0, end = 0;
};
CodeRange code_around(const void* function);

}  // namespace metal_attn::simulator
