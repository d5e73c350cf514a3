// The checks of attention's arguments.
#pragma once

#include "csrc/ops/common/check.h"
#include "csrc/problem/attention.h"

namespace metal_attn {

// How many keys before and after its position a query sees, or NO_WINDOW.
int64_t window_left(const FlashFwdOptions& options);
int64_t window_right(const FlashFwdOptions& options);

// The keys that queries of each sequence may see, as far as the host knows the lengths.
std::vector<SeenKeys> seen_keys(const FlashFwdArguments& arguments, const FlashFwdCall& call);

FlashFwdCall check_flash_fwd(const FlashFwdArguments& arguments);

// Checks that the tensor has the forward's shape of out and the dtype of q.
void check_like_out(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& forward);

// Checks that the tensor has the forward's shape of softmax_lse and float32.
void check_statistics(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& forward);

}  // namespace metal_attn
