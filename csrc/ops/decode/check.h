// What the ops of decoding refuse, beyond what attention and the cache do.
#pragma once

#include "csrc/problem/cache.h"
#include "csrc/problem/decode.h"

namespace metal_attn {

// Throws std::invalid_argument.
FlashFwdCall check_flash_decode(const FlashDecodeArguments& arguments);

// Of the new rows.
AppendKvProblem check_decode_step(const DecodeStepArguments& arguments);

}  // namespace metal_attn
