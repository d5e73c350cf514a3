// metal_attn::index_scores: the scores by which the indexer of sparse attention chooses keys.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// q: (B, H, Lq, D) and k: (B, Lk, D) have one dtype, D up to 256 and last strides 1. weights:
// (B, H, Lq), floating, any strides.
struct IndexScoresArguments {
  Tensor q;
  Tensor k;
  Tensor weights;
  std::optional<double> softmax_scale;  // default: D ** -0.5
  bool causal;
  std::optional<int64_t> q_offset;  // default: Lk - Lq
};

// The sums over h of weights[b, h, i] * ReLU(softmax_scale * <q[b, h, i], k[b, j]>), or -inf if
// causal hides j: (B, Lq, Lk) float32, contiguous.
Tensor index_scores(const IndexScoresArguments& arguments, Backend& backend);

}  // namespace metal_attn
