// metal_attn::flash_fwd and flash_varlen_fwd: attention forward, dense and packed.
#pragma once

#include <tuple>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// The uninitialised results of flash_fwd.
Tensor new_out(const FlashFwdArguments& arguments, int64_t head_dim_v);
Tensor new_lse(const FlashFwdArguments& arguments);

// Returns out, (..., Dv) with the other sizes, the dtype and the order of dimensions of q, and
// softmax_lse, (B, Hq, Lq) or (Hq, Tq), float32, contiguous.
// call: the checked arguments.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdCall& call, const FlashFwdArguments& arguments,
                                     Backend& backend);
// The same with the kind of tile that the caller chooses. Checks the arguments.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments, Backend& backend,
                                     bool tensor_tiles);

}  // namespace metal_attn
