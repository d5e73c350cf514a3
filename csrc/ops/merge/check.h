// What the ops of merge refuse, and what is left to know of their arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "csrc/problem/merge.h"

namespace metal_attn {

MergeProblem check_merge_state(const MergeStateArguments& arguments, bool inplace,
                               const std::optional<torch::stable::Tensor>& mask);

MergeProblem check_merge_splits(const MergeSplitsArguments& arguments);

}  // namespace metal_attn
