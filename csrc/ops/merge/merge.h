// metal_attn::merge_state and merge_splits: attention over a union of disjoint sets of keys.
#pragma once

#include <tuple>

#include "csrc/problem/merge.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// All throw std::invalid_argument for arguments other than csrc/problem/merge.h describes, and sum
// in float32. A set whose lse is -inf counts for nothing, whatever its out holds; rows of no keys
// are 0 with -inf. With infinity_is_empty an lse of +inf means the same, as in flash-attn and vLLM.

// out like out_a in dtype and memory order, and lse. Of an empty state and another, the other to
// the bit.
std::tuple<Tensor, Tensor> merge_state(const MergeStateArguments& arguments, Backend& backend);

// The same into out_a and lse_a, which share no memory with each other or with what is read. mask:
// bool, (B, L) or packed (T,); where it is false state a stays as it is, to the bit.
void merge_state_inplace(const MergeStateArguments& arguments, Backend& backend);

// out (B, H, L, Dv) and lse (B, H, L), contiguous.
std::tuple<Tensor, Tensor> merge_splits(const MergeSplitsArguments& arguments, Backend& backend);

// The same into out, of any of the three dtypes and any strides, the last 1, and lse, float32 of
// any strides. For other ops: these two are not checked.
void merge_splits(const Tensor& partial_out, const Tensor& partial_lse, const OptionalTensor& sink,
                  Tensor& out, Tensor& lse, Backend& backend);

}  // namespace metal_attn
