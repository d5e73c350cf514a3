// metal_attn::append_kv: writes new keys and values to a cache, rotated and quantised.
#pragma once

#include "csrc/problem/cache.h"
#include "csrc/runtime/backend.h"
#include "shaders/params/append.h"

namespace metal_attn {

// Refuses invalid arguments before anything is written. On mps the host does not read the values of
// indices, so the kernel does not write rows outside of the cache, and rows that need a missing row
// of the tables become NaN.
void append_kv(const AppendKvArguments& arguments, Backend& backend);

// decode_step also uses the following functions, because its kernel appends rows.
AppendKvProblem check_append_kv(const AppendKvArguments& arguments);

// True if loads, stores and rotations have full vectors.
struct AppendWidths {
  bool loads;
  bool stores;
  bool rotary;  // implies loads
};

AppendWidths append_widths(const AppendKvArguments& arguments, const AppendKvProblem& problem);

AppendParams append_params(const AppendKvArguments& arguments, const AppendKvProblem& problem);

}  // namespace metal_attn
