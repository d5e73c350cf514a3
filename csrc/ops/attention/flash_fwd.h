// metal_attn::flash_fwd and flash_varlen_fwd: attention forward, dense and packed.
#pragma once

#include <tuple>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// The results of flash_fwd, uninitialised.
Tensor new_out(const FlashFwdArguments& arguments, int64_t head_dim_v);
Tensor new_lse(const FlashFwdArguments& arguments);

// Returns out, of q's shape but for its last size, like q in dtype and in order of dimensions, and
// softmax_lse, (B, Hq, Lq) or (Hq, Tq), float32, contiguous. Throws std::invalid_argument for what
// the schema's documentation does not allow.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments, Backend& backend);
// The caller chooses the kind of tile, and not the backend.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments, Backend& backend,
                                     bool tensor_tiles);

}  // namespace metal_attn
