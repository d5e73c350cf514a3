// metal_attn::flash_decode: attention of few queries over long caches, split over the keys.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "csrc/ops/common/json.h"
#include "csrc/ops/decode/choose.h"
#include "csrc/problem/decode.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// As flash_fwd, without dropout and without rotation of k.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> flash_decode(
    const FlashDecodeArguments& arguments, Backend& backend);

PackedText flash_decode_explain(const FlashDecodeArguments& arguments);

// The same of a call that was checked, which may append new rows first.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> run(const FlashDecodeCall& call,
                                                             const FlashFwdArguments& arguments,
                                                             const FlashDecodeAppend* append,
                                                             Backend& backend);

PackedText explain(const FlashDecodeCall& call, const FlashFwdArguments& arguments,
                   const FlashDecodeAppend* append);

}  // namespace metal_attn
