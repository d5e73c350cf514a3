// The strides of rows as the params hold them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "shaders/params.h"

namespace metal_attn {

// Of a dense (B, H, L, D) or a packed (T, H, D) tensor.
RowStrides row_strides(const torch::stable::Tensor& tensor);

// Of statistics a row: dense (B, H, L) or packed (H, T).
RowStrides statistics_strides(const torch::stable::Tensor& tensor);

}  // namespace metal_attn
