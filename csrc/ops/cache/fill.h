// What shaders/cache_write.h is told of new rows and of the cache they go to.
#pragma once

#include "csrc/ops/cache/check_append_kv.h"
#include "shaders/params.h"

namespace metal_attn {

AppendParams append_params(const AppendKvArguments& arguments, const AppendKvProblem& problem);

// Columns of new rows that a thread moves at a time.
inline constexpr int kUnitColumns = 8;

// Which of its loads and stores are whole.
struct AppendWidths {
  bool loads;
  bool stores;
  bool rotary;  // if loads are
};

AppendWidths append_widths(const AppendKvArguments& arguments, const AppendKvProblem& problem);

}  // namespace metal_attn
