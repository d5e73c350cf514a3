// metal_attn::softmax, softmax_ and apply_causal_mask_: the unfused parts of attention.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// All take float32, float16 or bfloat16 of any strides, throw std::invalid_argument for arguments
// other than described, and accumulate in float32.

// The softmax of x, (..., N, ...) with N in 0..2^31-1024 at `dim`; a row of -inf alone gives 0.
// Like x in dtype, and in the memory order that torch.empty_like gives.
Tensor softmax(const Tensor& x, int64_t dim, Backend& backend);

// The same in place. Throws also where x may overlap itself.
Tensor softmax_inplace(const Tensor& x, int64_t dim, Backend& backend);

// scores: (..., Lq, Lk). Writes -inf where key > query + q_offset, |q_offset| <= 2^31-1024, and
// touches nothing else. Throws also where scores may overlap itself.
Tensor apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset, Backend& backend);

}  // namespace metal_attn
