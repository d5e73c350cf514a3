// Calls of torch's C functions that throw on an error.
#pragma once

#include <string>

#include "csrc/problem/tensor.h"

// Older headers of torch have another name for this macro. Our name is new, so a source file that
// forgets to include this header fails with every version.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define TORCH_CALL(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define TORCH_CALL(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace metal_attn {

// Looks up a function that only some versions of torch have, so that one binary serves all of them.
// Searches only the library that `function` is from. Returns null if it has no such symbol.
void* find_beside(const void* function, const char* name);

// The reason for the last failure of a C function of torch in this thread. torch before 2.13 only
// prints it on stderr, and the result is kReasonOnStderr.
inline constexpr char kReasonOnStderr[] =
    "torch before 2.13 prints the reason only on stderr: look there";
std::string torch_error_text(const void* function);

}  // namespace metal_attn
