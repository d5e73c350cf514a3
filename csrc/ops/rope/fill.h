// The launches of rope's kernels: params and buffers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/rope/choose.h"
#include "csrc/problem/rope.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// In place, q_out and k_out are q and k.
Launch rope_launch(const RopeArguments& arguments, const RopeProblem& problem,
                   const RopeSpecialisation& specialisation, const torch::stable::Tensor& q_out,
                   const torch::stable::Tensor& k_out);

Launch rope_tables_launch(const RopeTablesArguments& arguments, const RopeTablesProblem& problem,
                          const Grid& grid, const torch::stable::Tensor& cos,
                          const torch::stable::Tensor& sin);

}  // namespace metal_attn
