// The launches of merge's kernels: params and buffers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "csrc/ops/merge/choose.h"
#include "csrc/problem/merge.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// `out` and `lse`: in place those of a.
Launch merge_state_launch(const MergeStateArguments& arguments,
                          const std::optional<torch::stable::Tensor>& mask,
                          const MergeProblem& problem, const MergeSpecialisation& specialisation,
                          const torch::stable::Tensor& out, const torch::stable::Tensor& lse);

Launch merge_splits_launch(const torch::stable::Tensor& partial_out,
                           const torch::stable::Tensor& partial_lse,
                           const std::optional<torch::stable::Tensor>& sink,
                           const MergeProblem& problem, const MergeSpecialisation& specialisation,
                           const torch::stable::Tensor& out, const torch::stable::Tensor& lse);

}  // namespace metal_attn
