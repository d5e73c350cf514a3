// The strides of rows as the params hold them.
#pragma once

#include "csrc/problem/tensor.h"
#include "shaders/params.h"

namespace metal_attn {

// Of a dense (B, H, L, D) or a packed (T, H, D) tensor.
inline RowStrides row_strides(const Tensor& tensor) {
  if (tensor.dim() == 3) {
    return {0, tensor.stride(1), tensor.stride(0)};
  }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Of statistics a row: dense (B, H, L) or packed (H, T).
inline RowStrides statistics_strides(const Tensor& tensor) {
  if (tensor.dim() == 2) {
    return {0, tensor.stride(0), tensor.stride(1)};
  }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

}  // namespace metal_attn
