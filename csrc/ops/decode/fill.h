// The launch of decoding's kernel: params and buffers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/decode/choose.h"
#include "csrc/problem/decode.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// `out` and `lse`: the results, or with splits the results of each, in a dimension after that of
// the queries.
Launch flash_decode_launch(const FlashDecodeCall& call, const FlashFwdArguments& arguments,
                           const FlashDecodeAppend* append, const torch::stable::Tensor& out,
                           const torch::stable::Tensor& lse);

}  // namespace metal_attn
