// The checks of attention's arguments, and the problem that remains.
#pragma once

#include "csrc/ops/common/check.h"
#include "csrc/problem/attention.h"

namespace metal_attn {

// Keys before and behind a query's position that it sees, or NO_WINDOW.
int64_t window_left(const FlashFwdOptions& options);
int64_t window_right(const FlashFwdOptions& options);

// The keys that queries of each sequence may see; nothing of lengths that only the device knows.
std::vector<SeenKeys> seen_keys(const FlashFwdArguments& arguments, const FlashFwdCall& call);

// Throws std::invalid_argument.
FlashFwdCall check_flash_fwd(const FlashFwdArguments& arguments);

// The tensor has the shape of the forward's out and q's dtype.
void check_like_out(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& forward);

// The tensor has the shape of the forward's softmax_lse and is float32.
void check_statistics(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& forward);

}  // namespace metal_attn
