// Calls of torch's C functions that throw on an error.
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

// Functions that only some versions of torch have are looked up at run time, so that one binary
// serves all of them. The symbol of this name in the library that `function` comes from, whatever
// else the process has loaded; null if there is none.
void* find_beside(const void* function, const char* name);

// The reason for the last failure of a C function of torch in this thread. Before 2.13 torch prints
// it on stderr only, and the result is kReasonOnStderr.
inline constexpr char kReasonOnStderr[] =
    "torch before 2.13 says why on stderr only: look there for the reason";
std::string torch_error_text(const void* function);

}  // namespace metal_attn
