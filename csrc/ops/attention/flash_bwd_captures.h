// metal_attn::flex_bwd_captures: the gradients of tensors that score_mod captures.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// One gradient a load that has one (FlexOptions::shares), of the shape of the tensor it is from,
// float32, contiguous. With lse, delta and normalisers of flash_bwd.
std::vector<torch::stable::Tensor> flash_bwd_captures(const FlashBwdBiasArguments& arguments,
                                                      Backend& backend);

}  // namespace metal_attn
