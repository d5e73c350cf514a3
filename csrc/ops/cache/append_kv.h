// metal_attn::append_kv: new keys and values into a cache, quantised if it is, and rotated.
#pragma once

#include "csrc/problem/cache.h"
#include "csrc/runtime/backend.h"
#include "shaders/params/append.h"

namespace metal_attn {

// Throws std::invalid_argument for arguments other than csrc/problem/cache.h describes, before
// anything is written. On mps the host does not see values of indices: rows that do not fit, and
// those of batches or pages that do not exist, are not written, and rows of tables that do not
// exist become NaN.
void append_kv(const AppendKvArguments& arguments, Backend& backend);

// For decode_step, which appends in a kernel of its own: the checks, which loads and stores are
// whole, and the params of shaders/cache_write.h.
AppendKvProblem check_append_kv(const AppendKvArguments& arguments);

struct AppendWidths {
  bool loads;
  bool stores;
  bool rotary;  // if loads are
};

AppendWidths append_widths(const AppendKvArguments& arguments, const AppendKvProblem& problem);

AppendParams append_params(const AppendKvArguments& arguments, const AppendKvProblem& problem);

}  // namespace metal_attn
