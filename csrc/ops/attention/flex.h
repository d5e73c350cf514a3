// The additions of flex attention: texts made of score_mod and mask_mod, the tensors that
// they index, and the lists of a BlockMask.
#pragma once

#include "csrc/ops/common/check.h"
#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "shaders/params/attention.h"

namespace metal_attn {

// The lists are those of each block of queries, or the transposed ones.
enum class FlexWalk { kOverKeys, kOverQueries };

// Throws std::invalid_argument. `call` has the sizes already.
FlexFeatures check_flex(const FlexOptions& flex, const Tensor& q, const FlashFwdCall& call);

// Checks that the gradients have the transposed lists.
void check_flex_gradients(const FlexOptions& flex);

// Checks that each of FlexOptions::shares has all its parts.
void check_shares(const FlexOptions& flex);

// Checks a share, and returns its kernel's features.
FlexFeatures with_share(FlexFeatures features, const FlexOptions& flex, std::size_t share);

// True if threadgroups of the walk's rows start in the order that is given.
bool starts_in_order(const FlexOptions& flex, FlexWalk walk);

// True if a list ends past 2^31 elements of its tensor.
bool has_long_lists(const FlexOptions& flex);

// Keys that any list of a BlockMask has room for, which may be more than there are.
int64_t listed_keys(const FlexOptions& flex);

// counts are (B, H, lists), indices (B, H, lists, entries); sizes of 1 broadcast.
BlockListParams block_list_params(const Tensor& counts, const Tensor& indices);

FlexParams flex_params(const FlexOptions& flex, FlexWalk walk);

// Adds nothing without a BlockMask.
void append_block_lists(Buffers& buffers, const FlashFwdArguments& arguments, FlexWalk walk);

// The launch's grid must be known. Adds nothing without an order.
void append_block_order(Launch& launch, const FlashFwdArguments& arguments, FlexWalk walk);

// Throws std::invalid_argument unless `text` is the body of a function in shaders/flex.h, as
// torch_metal_attn/flex writes it: statements "const TYPE tN = ...;" and "return ...;" of words in
// a table, numbers and operators, which read a captured tensor at flex_index of each of its
// dimensions only. ranks: of the captured tensors.
void check_flex_text(ArgumentName name, const std::string& text, const std::vector<int64_t>& ranks);

}  // namespace metal_attn
