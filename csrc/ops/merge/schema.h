// The schemas of merge's ops, and how the dispatcher's arguments become structs.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

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

// More: arguments that only some of the ops have, after those of all.
template <auto run, typename... More>
struct MergeStateOp {
  static auto call(const torch::stable::Tensor& out_a, const torch::stable::Tensor& lse_a,
                   const torch::stable::Tensor& out_b, const torch::stable::Tensor& lse_b,
                   bool infinity_is_empty, More... more) {
    return run(MergeStateArguments{out_a, lse_a, out_b, lse_b, infinity_is_empty}, more...);
  }
};

template <auto run>
using MergeState = MergeStateOp<run>;
template <auto run>
using MergeStateInplace = MergeStateOp<run, std::optional<torch::stable::Tensor>>;

template <auto run>
struct MergeSplits {
  static auto call(const torch::stable::Tensor& partial_out,
                   const torch::stable::Tensor& partial_lse,
                   std::optional<torch::headeronly::ScalarType> out_dtype,
                   std::optional<torch::stable::Tensor> learnable_sink, bool infinity_is_empty) {
    return run(MergeSplitsArguments{partial_out, partial_lse, out_dtype, learnable_sink,
                                    infinity_is_empty});
  }
};

}  // namespace metal_attn
