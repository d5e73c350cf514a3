// How the kernels of merge are specialised, and their grids.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/common/grid.h"
#include "csrc/problem/merge.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

struct MergeSpecialisation {
  bool wide_loads;
  Grid grid;
};

MergeSpecialisation choose_merge_state(const MergeStateArguments& arguments,
                                       const MergeProblem& problem);

// `out_aligned`: every row of out begins at a multiple of 16 bytes.
MergeSpecialisation choose_merge_splits(const torch::stable::Tensor& partial_out,
                                        const MergeProblem& problem, bool out_aligned);

// Whether rows of a dense out are aligned to 16 bytes.
bool dense_rows_aligned_16(const MergeProblem& problem);

Defines merge_defines(const MergeProblem& problem, const MergeSpecialisation& specialisation);

}  // namespace metal_attn
