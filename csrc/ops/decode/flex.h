// metal_attn::flex_fwd: flash_fwd, or flash_decode for few queries.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

std::tuple<torch::stable::Tensor, torch::stable::Tensor> flex_fwd(
    const FlashFwdArguments& arguments, Backend& backend);

}  // namespace metal_attn
