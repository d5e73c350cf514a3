// Lists of keys, or of blocks of neighbouring keys, that flash_decode's queries see alone.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/problem/decode.h"
#include "shaders/params.h"

namespace metal_attn {

// Throws std::invalid_argument. `call` is checked already.
void check_indices(const KeyLists& lists, const FlashFwdArguments& arguments,
                   const FlashFwdCall& call);

// Keys that a list has room for.
int64_t listed_keys(const KeyLists& lists);

// Of the walk along the lists.
void fill_list_params(const KeyLists& lists, const FlashFwdCall& call, FlexParams& params);

// Empty without lists.
std::string describe_indices(const KeyLists& lists, const FlashFwdCall& call);

}  // namespace metal_attn
