// Options of flash_decode alone that hide keys: lists of keys, or of blocks of neighbouring keys,
// and trees of new tokens.
#pragma once

#include "csrc/problem/decode.h"
#include "shaders/params/decode.h"

namespace metal_attn {

// Throw std::invalid_argument. `call` is checked already; a tree sets its features.
void check_indices(const KeyLists& lists, const FlashFwdArguments& arguments,
                   const FlashFwdCall& call);
void check_tree(const FlashDecodeArguments& arguments, FlashFwdCall& call);

// Keys that a list has room for.
int64_t listed_keys(const KeyLists& lists);

// Fill the parameters of the walk along the lists, and of the tree.
void fill_list_params(const KeyLists& lists, const FlashFwdCall& call, FlexParams& params);
void fill_tree_params(const DecodeOptions& options, FlashDecodeParams& params);

// Empty without lists, or without a tree.
std::string describe_indices(const KeyLists& lists, const FlashFwdCall& call);
std::string describe_tree(const DecodeOptions& options);

}  // namespace metal_attn
