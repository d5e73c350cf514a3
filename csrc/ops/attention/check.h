// What attention refuses, and what is left to know of its arguments.
#pragma once

#include <cstdint>

#include "csrc/problem/attention.h"

namespace metal_attn {

// Keys before and behind a query's position that it sees, or NO_WINDOW.
int64_t window_left(const FlashFwdOptions& options);
int64_t window_right(const FlashFwdOptions& options);

// Throws std::invalid_argument.
FlashFwdCall check_flash_fwd(const FlashFwdArguments& arguments);

}  // namespace metal_attn
