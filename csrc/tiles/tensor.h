// What kernels on tensor tiles share.
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {

// Rows of a SIMD group, and columns of one product's result: also the keys of a forward's block.
inline constexpr int kTensorRows = 16;
inline constexpr int kTensorSpan = 32;

// Why a forward has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  const FlashFwdFeatures& f = problem.features;
  return f.q_block() % kTensorRows == 0 && f.kv_block() % kTensorSpan == 0
             ? nullptr
             : "a tensor tile of 16 queries and 32 keys would span two blocks of the BlockMask";
}

// Why gradients have 8x8 tiles only, or null.
inline const char* no_tensor_gradients(const FlashFwdProblem& problem) {
  const FlashFwdFeatures& features = problem.features;
  if (features.flex) {
    return "gradients through score_mod, mask_mod and block lists have 8x8 tiles only";
  }
  // Those gradients have kernels of their own, whose products are not rounded. delta must be that
  // of the same products.
  if (problem.element == Element::kFloat && (features.bias || features.alibi)) {
    return "float32's gradients with attn_bias or alibi_slopes have 8x8 tiles only";
  }
  return no_tensor_tiles(problem);
}

}  // namespace metal_attn
