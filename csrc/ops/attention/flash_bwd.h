// metal_attn::flash_bwd and flash_varlen_bwd: the gradients of attention.
#pragma once

#include <tuple>

#include "csrc/runtime/backend.h"
#include "csrc/tiles/flash_bwd.h"

namespace metal_attn {

// The forward's checks and those of its gradients.
FlashFwdCall analyse_differentiable(const FlashFwdArguments& forward);

Defines flash_bwd_defines(const FlashBwdSpecialisation& specialisation);

// dq, dk and dv, of the shapes of q, k and v and in the order of their dimensions in memory; and
// delta, of softmax_lse's shape: rowsum(dout * out) - dlse, which further gradients need; with
// exact_delta it is that of the out before it was rounded. With rotary tables dq and dk are those
// of the rotated q and k.
//
// normalisers, of the same shape: factors of exp(score - softmax_lse) that make the weights of a
// row add up to 1. It is empty if the rounding of softmax_lse does not show.
using FlashGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FlashGradients flash_bwd(const FlashBwdArguments& arguments, Backend& backend);
// The caller chooses the kind of tile, and not the backend.
FlashGradients flash_bwd(const FlashBwdArguments& arguments, Backend& backend, bool tensor_tiles);

}  // namespace metal_attn
