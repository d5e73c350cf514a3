// Tensor tiles of flash_fwd: which are chosen, and what they take.
#pragma once

#include "csrc/tiles/flash_fwd.h"

namespace metal_attn {

// Why a problem has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  if (problem.features.flex) {
    return "score_mod, mask_mod and block lists are in the kernels of 8x8 tiles only";
  }
  return problem.element == Element::kFloat ? "tensor operations cut float32 to 11 bits" : nullptr;
}

FlashFwdSpecialisation choose_flash_fwd_tensor(const FlashFwdProblem& problem, const Gpu& gpu);

// Of a thread: an estimate.
int tensor_registers(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
