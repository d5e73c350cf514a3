// The schemas of softmax's ops.
#pragma once

#include "csrc/ops/common/arguments.h"

#define SOFTMAX_ARGUMENTS "(Tensor x, int dim=-1"
#define SOFTMAX_INPLACE_ARGUMENTS "(Tensor(a!) x, int dim=-1"
#define CAUSAL_MASK_ARGUMENTS "(Tensor scores, SymInt q_offset=0"
#define CAUSAL_MASK_INPLACE_ARGUMENTS "(Tensor(a!) scores, SymInt q_offset=0"
// apply_causal_mask_ for graphs without mutations: masks a copy.
#define APPLY_CAUSAL_MASK_TO_COPY "_apply_causal_mask_to_copy" CAUSAL_MASK_ARGUMENTS ") -> Tensor"

namespace metal_attn {

template <auto run>
using Softmax = Unchanged<run, TensorArgument, int64_t>;

}  // namespace metal_attn
