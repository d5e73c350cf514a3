// Trees of new tokens: what flash_decode and decode_step refuse of them.
#pragma once

#include "csrc/problem/decode.h"

namespace metal_attn {

// Sets the features of `call`, which passed all other checks, if there is a tree. Throws
// std::invalid_argument.
void check_tree(const FlashDecodeArguments& arguments, FlashFwdCall& call);

}  // namespace metal_attn
