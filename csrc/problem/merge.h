// The arguments of the ops of merge, and the problem that remains after the checks.
#pragma once

#include <cstdint>

#include "csrc/problem/element.h"
#include "csrc/problem/tensor.h"
#include "shaders/params/merge.h"

namespace metal_attn {

// The maximal number of splits of the keys.
inline constexpr int64_t kMaxSplits = 1024;

// Dense (B, H, L, D) and (B, H, L), or packed (T, H, D) and (H, T). out_a and out_b have one dtype,
// float32, float16 or bfloat16, and any strides, the last 1. lse_a and lse_b: float32, any strides.
struct MergeStateArguments {
  Tensor out_a;
  Tensor lse_a;
  Tensor out_b;
  Tensor lse_b;
  bool infinity_is_empty;
  OptionalTensor mask = std::nullopt;  // only of merge_state_
};

struct MergeSplitsArguments {
  Tensor partial_out;                   // (B, H, L, S, Dv) float32, contiguous, S in 1..1024
  Tensor partial_lse;                   // (B, H, L, S) float32, contiguous
  std::optional<ScalarType> out_dtype;  // default: float32
  OptionalTensor learnable_sink;        // (H,): one more logit, without a value
  bool infinity_is_empty;
};

struct MergeProblem {
  Element element;  // of out
  std::optional<Element> sink;
  bool infinity_is_empty;
  bool in_place;
  bool some_rows;  // a mask selects the rows
  bool sums;       // splits have a maximum and a sum each, and no log-sum-exp
  MergeShape shape;
};

}  // namespace metal_attn
