// What the kernels are told of a cache and of new rows, and the launches of append_kv and
// copy_pages.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "csrc/ops/cache/choose.h"
#include "csrc/problem/cache.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

// The fields of `params` that are the options'.
void fill_cache_params(const CacheOptions& options, const torch::stable::Tensor& k,
                       FlashParams& params);

// For shaders/cache_write.h.
AppendParams append_params(const AppendKvArguments& arguments, const AppendKvProblem& problem);

Launch append_kv_launch(const AppendKvArguments& arguments, const AppendKvProblem& problem,
                        const AppendKvSpecialisation& specialisation);

Launch copy_pages_launch(const torch::stable::Tensor& cache, const torch::stable::Tensor& src,
                         const torch::stable::Tensor& dst,
                         const CopyPagesSpecialisation& specialisation);

}  // namespace metal_attn
