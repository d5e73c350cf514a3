// Calls of torch's C functions, which throw what they failed with.
#pragma once

#include <string>

#include "csrc/problem/tensor.h"

// Not by torch's name, which older headers lack: a source without this header then fails with each.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define TORCH_CALL(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define TORCH_CALL(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace metal_attn {

// What not every torch since 2.10 has is looked up at run time, so that one binary serves them all.
// The symbol of this name in the library that `function` comes from, whatever else the process has
// loaded; null if there is none.
void* find_beside(const void* function, const char* name);

// Why a C function of torch has just failed in this thread. Before 2.13 torch tells it on stderr
// only, and the answer is kUntold.
inline constexpr char kUntold[] =
    "torch before 2.13 says why on stderr only: look there for the reason";
std::string torch_error_text(const void* function);

}  // namespace metal_attn
