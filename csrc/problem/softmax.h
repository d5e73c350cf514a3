// What the ops of softmax work on, once it is checked.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/problem/element.h"

namespace metal_attn {

// A tensor as rows along its last dimension. wide_loads: they begin at 16 bytes, without gaps.
struct SoftmaxRows {
  Element element;
  int64_t count;
  int64_t length;
  bool wide_loads;
};

struct SoftmaxCall {
  torch::stable::Tensor x;  // the axis last
  SoftmaxRows rows;
};

}  // namespace metal_attn
