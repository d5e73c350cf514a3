// Signals that a kernel's code raises end its threadgroup and not the process.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct Worker;

// For its lifetime, handles kStopSignal and the signals of invalid memory accesses, divisions and
// instructions. Signals to threads that run no fiber go to the previous handlers.
class SignalHandlers {
 public:
  SignalHandlers();
  ~SignalHandlers();
};

// Makes the calling thread the worker's. The signals above stop its fibers; all others are blocked.
void guard_thread(Worker& worker);

// A worker's thread that receives this signal stops its fiber if the fiber runs the kernel's code.
extern const int kStopSignal;

// The addresses of machine code in the image that holds `function`.
struct CodeRange {
  uintptr_t begin = 0, end = 0;
};
CodeRange code_around(const void* function);

}  // namespace metal_attn::simulator
