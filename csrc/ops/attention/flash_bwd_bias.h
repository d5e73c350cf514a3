// metal_attn::flash_bwd_bias, flash_bwd_slopes, their packed forms, and flex_bwd_captures: the
// gradients of biases, of ALiBi slopes, and of tensors that score_mod captures.
#pragma once

#include "csrc/ops/common/recorder.h"
#include "csrc/tiles/flash_bwd.h"

namespace metal_attn {

FlashFwdCall check_score_gradient(const FlashBwdBiasArguments& arguments);

Buffers score_gradient_buffers(const FlashFwdCall& call, const FlashBwdBiasArguments& arguments,
                               const Tensor& result);

// The number of parts into which the loop over `shared` tiles of scores is divided. The loop runs
// for each of `owned` tiles of the tensor. At least 1, and at most `shared` if that is not 0.
int64_t score_gradient_splits(int64_t owned, int64_t shared);

JsonObject score_gradient_note(const FlashBwdSpecialisation& specialisation);

// The gradient of attn_bias or of a floating attn_mask, with its shape and dtype, contiguous. It is
// summed over the broadcast dimensions.
Tensor flash_bwd_bias(const FlashBwdBiasArguments& arguments, Backend& backend);

// The gradient of alibi_slopes, with its shape, float32, contiguous.
Tensor flash_bwd_slopes(const FlashBwdBiasArguments& arguments, Backend& backend);

// The gradients of captured tensors, one for each entry of FlexOptions::shares, with the shape of
// the captured tensor, float32, contiguous.
std::vector<Tensor> flash_bwd_captures(const FlashBwdBiasArguments& arguments, Backend& backend);

}  // namespace metal_attn
