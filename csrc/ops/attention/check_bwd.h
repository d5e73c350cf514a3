// Argument checks that the ops of attention's backward share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/common/check.h"
#include "csrc/problem/attention.h"

namespace metal_attn {

// k and v are not quantised, which their dtype alone may tell.
void check_differentiable(const FlashFwdArguments& forward);

// Of the shape that the forward's out has, and of q's dtype.
void check_like_out(ArgumentName name, const torch::stable::Tensor& tensor,
                    const FlashFwdArguments& forward);

// Of the shape that the forward's softmax_lse has, float32.
void check_statistics(ArgumentName name, const torch::stable::Tensor& tensor,
                      const FlashFwdArguments& forward);

// As an op of this package returned it.
void check_contiguous(ArgumentName name, const torch::stable::Tensor& tensor);

}  // namespace metal_attn
