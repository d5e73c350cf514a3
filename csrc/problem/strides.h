// Strides for the params.
#pragma once

#include "csrc/problem/tensor.h"
#include "shaders/params/common.h"

namespace metal_attn {

// 0 if the dimension is broadcast.
inline int64_t broadcast_stride(const Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// For a dense (B, H, L, D) or packed (T, H, D) tensor.
inline RowStrides row_strides(const Tensor& tensor) {
  if (tensor.dim() == 3) { return {0, tensor.stride(1), tensor.stride(0)}; }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// For one number per row: dense (B, H, L) or packed (H, T).
inline RowStrides statistics_strides(const Tensor& tensor) {
  if (tensor.dim() == 2) { return {0, tensor.stride(0), tensor.stride(1)}; }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

}  // namespace metal_attn
