#include "csrc/ops/common/strides.h"

namespace metal_attn {

using torch::stable::Tensor;

RowStrides row_strides(const Tensor& tensor) {
  if (tensor.dim() == 3) {
    return {0, tensor.stride(1), tensor.stride(0)};
  }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

RowStrides statistics_strides(const Tensor& tensor) {
  if (tensor.dim() == 2) {
    return {0, tensor.stride(0), tensor.stride(1)};
  }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

}  // namespace metal_attn
