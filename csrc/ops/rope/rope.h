// metal_attn::rope, rope_ and rope_tables: rotary position embeddings.
#pragma once

#include <tuple>

#include "csrc/problem/rope.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// All throw std::invalid_argument for arguments other than csrc/problem/rope.h describes. A row
// that values of positions or seqlen_offsets put outside the tables gives NaN, and is not read.

// New tensors like q and k in dtype and in order of dimensions, the last one innermost; without k
// the second one is empty, (0).
std::tuple<Tensor, Tensor> rope(const RopeArguments& arguments, Backend& backend);

// In place. Throws also where q and k may overlap themselves, each other or another argument.
void rope_inplace(const RopeArguments& arguments, Backend& backend);

// cos and sin of positions times inv_freq, times attention_factor: (*positions.shape, N),
// contiguous, float32 unless dtype says float16 or bfloat16.
std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& arguments, Backend& backend);

}  // namespace metal_attn
