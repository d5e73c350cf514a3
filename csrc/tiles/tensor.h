// What kernels on tensor tiles share.
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {

// Rows of a SIMD group, and columns of one product's result: also the keys of a forward's block.
inline constexpr int kTensorRows = 16;
inline constexpr int kTensorSpan = 32;

inline int spans(int columns) { return (columns + kTensorSpan - 1) / kTensorSpan; }

// Registers of a thread for [16, 32], of float32 and of an operand.
inline constexpr int kTensorResult = 16;
inline int tensor_operand(Element element) { return kTensorResult * element_bytes(element) / 4; }

// Loads of 16 bytes for 8 neighbours of a row.
inline int unit_loads(Element element) { return element_bytes(element) / 2; }

// Why a forward has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  return within_blocks(problem.features, kTensorRows, kTensorSpan)
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

// Loads of a fragment of rows that are read again. Alignment, which may double them, must not
// change the tile: it would change the bits of results.
template <class Specialisation>
int row_loads(const Specialisation& s) {
  // A rotated element is made of two, a cosine and a sine.
  return s.features.rotary ? 8 : 1;
}

// What features hold beside tiles.
inline int feature_registers(const FlashFwdFeatures& f) {
  // What score_mod and mask_mod hold is not known; by judgement.
  return (f.band || f.chunk ? 3 : 0) + (f.unpaired_keys() ? 14 : 0) + (f.flex ? 16 : 0);
}

// Registers are a part of the cache since M3, so a larger tile costs cache and not occupancy. How
// large it may be is a judgement: nobody here could measure it.
inline constexpr int kTensorRegisters = 168;

}  // namespace metal_attn
