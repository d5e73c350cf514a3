// metal_attn::softmax, softmax_ and apply_causal_mask_: the unfused parts of attention.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// Tensors have float32, float16 or bfloat16 and any strides. All accumulate in float32.

// The softmax of x, (..., N, ...) with N in 0..2^31-1024 at `dim`. A row with only -inf becomes 0.
// The result has the dtype of x and the memory order of torch.empty_like.
Tensor softmax(const Tensor& x, int64_t dim, Backend& backend);

// In place. Also refuses an x that may overlap itself.
Tensor softmax_inplace(const Tensor& x, int64_t dim, Backend& backend);

// scores: (..., Lq, Lk). Writes -inf if key > query + q_offset, |q_offset| <= 2^31-1024, and writes
// nothing else. Also refuses scores that may overlap themselves.
Tensor apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset, Backend& backend);

}  // namespace metal_attn
