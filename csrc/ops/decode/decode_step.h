// metal_attn::decode_step: rope, append_kv and flash_decode in one dispatch, or two with splits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "csrc/problem/decode.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// The same result as the three ops.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> decode_step(
    const DecodeStepArguments& arguments, Backend& backend);

}  // namespace metal_attn
