// metal_attn::flash_bwd and flash_varlen_bwd: the gradients of attention.
#pragma once

#include <tuple>

#include "csrc/runtime/backend.h"
#include "csrc/tiles/flash_bwd.h"

namespace metal_attn {

// Checks the arguments of a forward whose gradients are computed.
FlashFwdCall check_differentiable(const FlashFwdArguments& forward);

Defines flash_bwd_defines(const FlashBwdSpecialisation& specialisation);

// - dq, dk and dv have the shapes and the orders of dimensions of q, k and v. With rotary tables,
//   dq and dk are the gradients of the rotated q and k.
// - delta = rowsum(dout * out) - dlse has the shape of softmax_lse. Further gradients need it.
//   With exact_delta it is computed from the unrounded out.
// - normalisers has the shape of softmax_lse: factors of exp(score - softmax_lse) that make the
//   weights of a row add up to 1. It is empty if the rounding of softmax_lse is not visible.
using FlashGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

FlashGradients flash_bwd(const FlashBwdArguments& arguments, Backend& backend);
// The same with the kind of tile that the caller chooses.
FlashGradients flash_bwd(const FlashBwdArguments& arguments, Backend& backend, bool tensor_tiles);

}  // namespace metal_attn
