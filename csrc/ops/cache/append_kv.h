// metal_attn::append_kv: new keys and values into a cache, quantised if it is, and rotated.
#pragma once

#include "csrc/problem/cache.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// Throws std::invalid_argument for arguments other than csrc/problem/cache.h describes, before
// anything is written. On mps the host does not see values of indices: rows that do not fit, and
// those of batches or pages that do not exist, are not written, and rows of tables that do not
// exist become NaN.
void append_kv(const AppendKvArguments& arguments, Backend& backend);

}  // namespace metal_attn
