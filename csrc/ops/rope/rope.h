// metal_attn::rope, rope_ and rope_tables: rotary position embeddings.
#pragma once

#include <tuple>

#include "csrc/problem/rope.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// If positions or seqlen_offsets select a row outside of the tables, the result is NaN.

// Returns new tensors with the dtypes and the orders of dimensions of q and k, the last dimension
// innermost. Without k the second tensor is empty, (0).
std::tuple<Tensor, Tensor> rope(const RopeArguments& arguments, Backend& backend);

// In place. Also refuses q and k that may overlap themselves, each other or another argument.
void rope_inplace(const RopeArguments& arguments, Backend& backend);

// Returns cos and sin of positions * inv_freq, times attention_factor: (*positions.shape, N),
// contiguous. dtype: float32 by default, float16 or bfloat16.
std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& arguments, Backend& backend);

}  // namespace metal_attn
