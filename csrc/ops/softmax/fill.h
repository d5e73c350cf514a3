// The launches of softmax's kernels: params and buffers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/ops/softmax/choose.h"
#include "csrc/problem/softmax.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// `out`: the axis last. In place it is call.x.
Launch softmax_launch(const SoftmaxCall& call, const SoftmaxSpecialisation& specialisation,
                      const torch::stable::Tensor& out);

Launch causal_mask_launch(const SoftmaxRows& rows, const SoftmaxSpecialisation& specialisation,
                          const torch::stable::Tensor& scores, int64_t q_offset);

}  // namespace metal_attn
