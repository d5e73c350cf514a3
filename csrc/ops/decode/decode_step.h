// metal_attn::decode_step: rope, append_kv and flash_decode in one dispatch, or two with splits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>

#include "csrc/ops/cache/append_kv.h"
#include "csrc/ops/decode/flash_decode.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// `append` as for append_kv, with cache_seqlens; its q is the queries if they are turned. `decode`
// as for flash_decode over the caches of `append`, without lengths and tables of its own: those are
// cache_seqlens and the new keys, and rotary_cos and rotary_sin.
struct DecodeStepArguments {
  AppendKvArguments append;
  FlashDecodeArguments decode;
};

// The same result as the three ops.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> decode_step(
    const DecodeStepArguments& arguments, Backend& backend);

std::string decode_step_explain(const DecodeStepArguments& arguments);

}  // namespace metal_attn
