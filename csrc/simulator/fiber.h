// Switches between stacks, and preserves the registers that a call preserves.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct Context {
  void* stack;
  void* frame;
  void* resume;
};

inline uintptr_t stack_pointer() {
  uintptr_t value;
#if defined(__x86_64__)
  asm("movq %%rsp, %0" : "=r"(value));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(value));
#else
#error "the simulator runs on x86-64 and arm64"
#endif
  return value;
}

// The caller spills the clobbered registers that it needs. The switch is inlined and jumps instead
// of calling, which keeps the processor's return predictor correct: all lanes stop at the same
// place, so that the prediction for one lane holds for the next.
inline __attribute__((always_inline)) void switch_context(Context* from, const Context* to) {
#if defined(__x86_64__)
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%0)\n\t"
      "movq %%rbp, 8(%0)\n\t"
      "movq %%rax, 16(%0)\n\t"
      "movq 0(%1), %%rsp\n\t"
      "movq 8(%1), %%rbp\n\t"
      "jmpq *16(%1)\n"
      "1:"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
#elif defined(__aarch64__)
  register Context* out asm("x0") = from;
  register const Context* in asm("x1") = to;
  asm volatile(
      "adr x9, 1f\n\t"
      "mov x10, sp\n\t"
      "stp x10, x29, [x0]\n\t"
      "str x9, [x0, #16]\n\t"
      "ldp x10, x29, [x1]\n\t"
      "ldr x9, [x1, #16]\n\t"
      "mov sp, x10\n\t"
      "br x9\n"
      "1:"
      : "+r"(out), "+r"(in)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
        "x16", "x17", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30",
        "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",
        "v27", "v28", "v29", "v30", "v31", "cc", "memory"
#ifndef __APPLE__
        ,
        "x18"  // reserved on Apple's systems, a register like any other elsewhere
#endif
  );
#endif
}

// A context that starts `entry` at the top of a stack. `entry` must not return.
inline Context fresh_context(char* stack_top, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t{15};
#if defined(__x86_64__)
  top -= 8;  // where a call would leave the stack pointer
#endif
  return {reinterpret_cast<void*>(top), nullptr, reinterpret_cast<void*>(entry)};
}

}  // namespace metal_attn::simulator
