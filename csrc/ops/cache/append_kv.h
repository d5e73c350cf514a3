// metal_attn::append_kv: new keys and values into a cache, quantised if it is, and rotated.
#pragma once

#include "csrc/ops/common/json.h"
#include "csrc/problem/cache.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// Throws std::invalid_argument for arguments other than csrc/problem/cache.h describes, before
// anything is written. On mps the host does not see values of indices: rows that do not fit, and
// those of batches or pages that do not exist, are not written, and rows of tables that do not
// exist become NaN.
void append_kv(const AppendKvArguments& arguments, Backend& backend);

// The same checks and choice as JSON, without running anything.
PackedText append_kv_explain(const AppendKvArguments& arguments);

}  // namespace metal_attn
