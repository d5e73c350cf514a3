// The schema of the indexer's op, and how the dispatcher's arguments become a struct.
#pragma once

#include "csrc/ops/indexer/index_scores.h"

#define INDEX_SCORES_ARGUMENTS                                                             \
  "(Tensor q, Tensor k, Tensor weights, *, float? softmax_scale=None, bool causal=False, " \
  "SymInt? q_offset=None"

namespace metal_attn {

template <auto run>
struct IndexScores {
  static auto call(const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                   const torch::stable::Tensor& weights, std::optional<double> softmax_scale,
                   bool causal, std::optional<int64_t> q_offset) {
    return run(IndexScoresArguments{q, k, weights, softmax_scale, causal, q_offset});
  }
};

}  // namespace metal_attn
