// The schemas of softmax's ops, and how the dispatcher gives their arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#define SOFTMAX_ARGUMENTS "(Tensor x, int dim=-1"
#define SOFTMAX_INPLACE_ARGUMENTS "(Tensor(a!) x, int dim=-1"
#define SOFTMAX_EXPLAIN_ARGUMENTS SOFTMAX_ARGUMENTS ", *, bool inplace=False"
#define CAUSAL_MASK_ARGUMENTS "(Tensor scores, SymInt q_offset=0"
#define CAUSAL_MASK_INPLACE_ARGUMENTS "(Tensor(a!) scores, SymInt q_offset=0"
// What apply_causal_mask_ is in a graph without mutations: applied to a copy.
#define APPLY_CAUSAL_MASK_TO_COPY "_apply_causal_mask_to_copy" CAUSAL_MASK_ARGUMENTS ") -> Tensor"

namespace metal_attn {

// `run` of a tensor and a number, and `more`.
template <auto run, typename... More>
struct SoftmaxOp {
  static auto call(const torch::stable::Tensor& x, int64_t number, More... more) {
    return run(x, number, more...);
  }
};

template <auto run>
using Softmax = SoftmaxOp<run>;
template <auto run>
using SoftmaxExplain = SoftmaxOp<run, bool>;

}  // namespace metal_attn
