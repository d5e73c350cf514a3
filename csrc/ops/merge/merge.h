// metal_attn::merge_state and merge_splits: merge results of attention over disjoint sets of keys.
#pragma once

#include <tuple>

#include "csrc/problem/merge.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// All ops accumulate in float32. A state whose lse is -inf is empty, and its out is ignored. Rows
// whose states are all empty are 0 with an lse of -inf. With infinity_is_empty an lse of +inf means
// empty, too, as in flash-attn and vLLM.

// Returns out, with the dtype and the memory order of out_a, and lse. If one state is empty, the
// result is a bitwise copy of the other state.
std::tuple<Tensor, Tensor> merge_state(const MergeStateArguments& arguments, Backend& backend);

// Writes to out_a and lse_a, which must not overlap each other or the inputs. mask: bool, (B, L) or
// packed (T,). Rows whose mask is false keep state a, bit for bit.
void merge_state_inplace(const MergeStateArguments& arguments, Backend& backend);

// Returns out (B, H, L, Dv) and lse (B, H, L), contiguous.
std::tuple<Tensor, Tensor> merge_splits(const MergeSplitsArguments& arguments, Backend& backend);

// For other ops. Writes to out (float32, float16 or bfloat16, last stride 1) and to lse (float32),
// and does not check the arguments. statistics: (B, H, L, 2 S), the maximum of the scores of each
// split in base 2, then the sums of the splits' weights. A split with a sum of 0 is empty.
void merge_splits(const Tensor& partial_out, const Tensor& statistics, const OptionalTensor& sink,
                  Tensor& out, Tensor& lse, Backend& backend);

}  // namespace metal_attn
