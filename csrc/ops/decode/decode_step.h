// metal_attn::decode_step: rope, append_kv and flash_decode in one dispatch, or two with splits.
#pragma once

#include <tuple>

#include "csrc/problem/decode.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// Has the same result as the three ops.
std::tuple<Tensor, Tensor> decode_step(const DecodeStepArguments& arguments, Backend& backend);

}  // namespace metal_attn
