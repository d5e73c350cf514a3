// The options of flex attention: the texts of score_mod and mask_mod, the tensors that they
// capture, and the lists of a BlockMask.
#pragma once

#include "csrc/ops/common/check.h"
#include "csrc/problem/attention.h"
#include "shaders/params/attention.h"

namespace metal_attn {

// A kernel loops over keys for each block of queries, or over queries for each block of keys.
enum class FlexWalk { kOverKeys, kOverQueries };

// The sizes in `call` must be set.
FlexFeatures check_flex(const FlexOptions& flex, const Tensor& q, const FlashFwdCall& call);

// Checks what only the backward needs: the transposed lists, and the slope of a score.
void check_flex_gradients(const FlexOptions& flex);

// A share is the derivative of a score by an element of a captured tensor. Checks that the lists of
// shares, places, captured tensors and owners have the same length.
void check_shares(const FlexOptions& flex);

// Checks share number `share`. Returns the features of the kernel of its captured tensor's
// gradient.
FlexFeatures with_share(FlexFeatures features, const FlexOptions& flex, std::size_t share);

// True if there is an order in which threadgroups start.
bool starts_in_order(const FlexOptions& flex, FlexWalk walk);

// True if offsets in a list need 64 bits.
bool has_long_lists(const FlexOptions& flex);

// An upper bound of the keys or queries in a list of a BlockMask. It may exceed the length.
int64_t listed_rows(const FlexOptions& flex, FlexWalk walk);

// counts: (B, H, lists). indices: (B, H, lists, entries). Sizes of 1 broadcast.
BlockListParams block_list_params(const OptionalTensor& counts, const Tensor& indices);

FlexParams flex_params(const FlexOptions& flex, FlexWalk walk);

void append_block_lists(Buffers& buffers, const FlashFwdArguments& arguments, FlexWalk walk);

// The grid of `launch` must be set.
void append_block_order(Launch& launch, const FlashFwdArguments& arguments, FlexWalk walk);

// Checks that `text` is the body of a function in shaders/flex.h: statements "const TYPE tN = ...;"
// and "return ...;" of known words, numbers and operators, as torch_metal_attn/flex writes them.
// The text may index a captured tensor only through flex_index, in every dimension. ranks: one for
// each tensor.
void check_flex_text(ArgumentName name, const std::string& text, const std::vector<int64_t>& ranks);

}  // namespace metal_attn
