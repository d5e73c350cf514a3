// The schemas of merge's ops, and the conversion of the dispatcher's arguments to structs.
#pragma once

#include "csrc/ops/common/arguments.h"
#include "csrc/problem/merge.h"

#define MERGE_STATE_OPTIONS ", Tensor out_b, Tensor lse_b, *, bool infinity_is_empty=False"
#define MERGE_STATE_ARGUMENTS "(Tensor out_a, Tensor lse_a" MERGE_STATE_OPTIONS
#define MERGE_STATE_INPLACE_ARGUMENTS \
  "(Tensor(a!) out_a, Tensor(b!) lse_a" MERGE_STATE_OPTIONS ", Tensor? mask=None"
#define MERGE_SPLITS_ARGUMENTS                                              \
  "(Tensor partial_out, Tensor partial_lse, *, ScalarType? out_dtype=None," \
  " Tensor? learnable_sink=None, bool infinity_is_empty=False"
#define MERGE_RESULT "(Tensor out, Tensor lse)"

namespace metal_attn {

template <auto run>
using MergeState = InStruct<run, MergeStateArguments, TensorArgument, TensorArgument,
                            TensorArgument, TensorArgument, bool>;
template <auto run>
using MergeStateInplace = InStruct<run, MergeStateArguments, TensorArgument, TensorArgument,
                                   TensorArgument, TensorArgument, bool, OptionalTensor>;
template <auto run>
using MergeSplits = InStruct<run, MergeSplitsArguments, TensorArgument, TensorArgument,
                             std::optional<ScalarType>, OptionalTensor, bool>;

}  // namespace metal_attn
