// What not every torch since 2.10 has of its C functions: looked up at run time, so that one binary
// serves them all.
#pragma once

#include <string>

namespace metal_attn {

// The symbol of this name in the library that `function` comes from, whatever else the process has
// loaded; null if there is none.
void* find_beside(const void* function, const char* name);

// Why a C function of torch has just failed in this thread. Before 2.13 torch tells it on stderr
// only, and the answer says so.
std::string torch_error_text(const void* function);

}  // namespace metal_attn
