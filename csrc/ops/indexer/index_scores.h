// metal_attn::index_scores: by which a sparse attention's indexer chooses each query's keys.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// q: (B, H, Lq, D) and k: (B, Lk, D) alike in dtype, D up to 256 and last strides 1; weights:
// (B, H, Lq), floating, any strides.
struct IndexScoresArguments {
  Tensor q;
  Tensor k;
  Tensor weights;
  std::optional<double> softmax_scale;  // D ** -0.5
  bool causal;
  std::optional<int64_t> q_offset;  // Lk - Lq
};

// The sums over h of weights[b, h, i] * ReLU(softmax_scale * <q[b, h, i], k[b, j]>), -inf where
// causal hides j: (B, Lq, Lk) float32, contiguous. Throws std::invalid_argument for others.
Tensor index_scores(const IndexScoresArguments& arguments, Backend& backend);

}  // namespace metal_attn
