// Trees of new tokens, of flash_decode and decode_step.
#pragma once

#include <string>

#include "csrc/problem/decode.h"
#include "shaders/params.h"

namespace metal_attn {

// Sets the features of `call`, which is checked already, if there is a tree. Throws
// std::invalid_argument.
void check_tree(const FlashDecodeArguments& arguments, FlashFwdCall& call);

// Empty without a tree.
std::string describe_tree(const DecodeOptions& options);

void fill_tree_params(const DecodeOptions& options, FlashDecodeParams& params);

}  // namespace metal_attn
