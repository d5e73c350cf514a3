// What every kernel of attention is given: the problem as params, and the buffers that it reads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/attention/check.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

// Of a dense (B, H, L, D) or a packed (T, H, D) tensor.
RowStrides row_strides(const torch::stable::Tensor& tensor);

// Of statistics a row: dense (B, H, L) or packed (H, T).
RowStrides statistics_strides(const torch::stable::Tensor& tensor);

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
