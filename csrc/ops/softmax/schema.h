// The schemas of softmax's ops.
#pragma once

namespace metal_attn {

inline constexpr char kSoftmax[] = "softmax(Tensor x, int dim=-1) -> Tensor";
inline constexpr char kSoftmaxInplace[] = "softmax_(Tensor(a!) x, int dim=-1) -> Tensor(a!)";
inline constexpr char kSoftmaxExplain[] =
    "softmax_explain(Tensor x, int dim=-1, *, bool inplace=False) -> int[]";
inline constexpr char kApplyCausalMask[] =
    "apply_causal_mask_(Tensor(a!) scores, SymInt q_offset=0) -> Tensor(a!)";
inline constexpr char kApplyCausalMaskExplain[] =
    "apply_causal_mask_explain(Tensor scores, SymInt q_offset=0) -> int[]";
// What apply_causal_mask_ is in a graph without mutations: applied to a copy.
inline constexpr char kApplyCausalMaskToCopy[] =
    "_apply_causal_mask_to_copy(Tensor scores, SymInt q_offset=0) -> Tensor";

}  // namespace metal_attn
