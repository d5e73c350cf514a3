// Tensor tiles of flash_fwd: which are chosen, and what they take.
#pragma once

#include "csrc/tiles/flash_fwd.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {

// Queries of a SIMD group, and keys of a block: also the columns of one product's result.
inline constexpr int kTensorRows = 16;
inline constexpr int kTensorKeys = 32;

// Why a problem has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  if (!within_blocks(problem.features, kTensorRows, kTensorKeys)) {
    return "a tensor tile of 16 queries and 32 keys would span two blocks of the BlockMask";
  }
  return problem.element == Element::kFloat ? "tensor operations cut float32 to 11 bits" : nullptr;
}

FlashFwdSpecialisation choose_flash_fwd_tensor(const FlashFwdProblem& problem, const Gpu& gpu);

// Of a thread: an estimate.
int tensor_registers(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
