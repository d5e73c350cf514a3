// What the choosers of kernels on tensor tiles share.
#pragma once

#include <algorithm>

#include "csrc/ops/attention/types.h"
#include "csrc/tiles/gpu.h"

namespace metal_attn {

// Columns of one product's result.
inline constexpr int kTensorSpan = 32;

inline int spans(int columns) { return (columns + kTensorSpan - 1) / kTensorSpan; }

// Registers of a thread for [16, 32], of float32 and of half precision.
inline constexpr int kTensorResult = 16;
inline constexpr int kTensorOperand = 8;

// Why a problem has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  if (problem.features.flex) {
    return "score_mod, mask_mod and block lists are in the kernels of 8x8 tiles only";
  }
  return problem.element == Element::kFloat ? "tensor operations cut float32 to 11 bits" : nullptr;
}

// Tiles are those of the first GPU that has matrix units, on earlier ones too.
template <class Specialisation>
bool fits_tensor_registers(const Specialisation& s, const Gpu& gpu) {
  return s.registers() <= register_limit({std::max(gpu.family, kTensorFamily), gpu.cores});
}

}  // namespace metal_attn
