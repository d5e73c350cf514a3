// What softmax and apply_causal_mask_ refuse, and the rows that they work on.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/problem/softmax.h"

namespace metal_attn {

// Whether rows begin at 16 bytes, without gaps.
bool wide_rows(const torch::stable::Tensor& tensor);

// x with the axis as its last dimension; a number is a row of one.
torch::stable::Tensor axis_last(const torch::stable::Tensor& x, int64_t dim);

SoftmaxCall check_softmax(const torch::stable::Tensor& x, int64_t dim, bool in_place);

SoftmaxRows check_causal_mask(const torch::stable::Tensor& scores, int64_t q_offset);

}  // namespace metal_attn
