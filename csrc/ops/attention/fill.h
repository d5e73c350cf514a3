// What every kernel of attention is given: the problem as params, and the buffers that it reads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

// 0 along dimensions that the mask does not have, or has one element of.
MaskStrides mask_strides(const std::optional<torch::stable::Tensor>& mask);

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
