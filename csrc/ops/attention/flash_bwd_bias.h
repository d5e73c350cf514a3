// metal_attn::flash_bwd_bias, flash_bwd_slopes, their packed forms and flex_bwd_captures: the
// gradients of what attention adds to its scores, and of what score_mod captures.
#pragma once

#include "csrc/ops/common/recorder.h"
#include "csrc/tiles/flash_bwd.h"

namespace metal_attn {

// Checks the arguments of gradients of scores.
FlashFwdCall analyse_score_gradient(const FlashBwdBiasArguments& arguments);

// The buffers that it reads, for dense or packed attention, and the result that it writes.
Buffers score_gradient_buffers(const FlashFwdCall& call, const FlashBwdBiasArguments& arguments,
                               const Tensor& result);

// Parts of the walk over `shared` tiles of scores, for each of `owned` tiles of the tensor that is
// added to them: at least 1, and at most `shared` unless that is 0.
int64_t score_gradient_splits(int64_t owned, int64_t shared);

// The note of its launch.
JsonObject score_gradient_note(const FlashBwdSpecialisation& specialisation);

// The gradient of attn_bias, or of a floating attn_mask: of its shape and dtype, contiguous, summed
// over the dimensions of size 1 that it broadcasts.
Tensor flash_bwd_bias(const FlashBwdBiasArguments& arguments, Backend& backend);

// That of alibi_slopes: of its shape, float32, contiguous.
Tensor flash_bwd_slopes(const FlashBwdBiasArguments& arguments, Backend& backend);

// Those of captured tensors: one a load that has one (FlexOptions::shares), of the shape of the
// tensor it is from, float32, contiguous.
std::vector<Tensor> flash_bwd_captures(const FlashBwdBiasArguments& arguments, Backend& backend);

}  // namespace metal_attn
