// The options of flash_decode that hide keys: lists of keys or of blocks, and trees of new tokens.
#pragma once

#include "csrc/problem/decode.h"
#include "shaders/params/decode.h"

namespace metal_attn {

// `call` must be checked. check_tree sets the features of a tree in `call`.
void check_indices(const KeyLists& lists, const FlashFwdArguments& arguments,
                   const FlashFwdCall& call);
void check_tree(const FlashDecodeArguments& arguments, FlashFwdCall& call);

// The largest number of keys in a list.
int64_t listed_keys(const KeyLists& lists);

void fill_list_params(const KeyLists& lists, const FlashFwdCall& call, FlexParams& params);
void fill_tree_params(const DecodeOptions& options, FlashDecodeParams& params);

// Describe the choice for `explain`. "" without lists, or without a tree.
std::string describe_indices(const KeyLists& lists, const FlashFwdCall& call);
std::string describe_tree(const DecodeOptions& options);

}  // namespace metal_attn
