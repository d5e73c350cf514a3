// Tensor tiles of flash_fwd: which are chosen, and what they take.
#pragma once

#include "csrc/tiles/flash_fwd.h"

namespace metal_attn {

// Not of float32, which tensor operations cut to 11 bits.
inline bool has_tensor_tiles(const FlashFwdProblem& problem) {
  return problem.element != Element::kFloat;
}

FlashFwdSpecialisation choose_flash_fwd_tensor(const FlashFwdProblem& problem, const Gpu& gpu);

// Of a thread: an estimate.
int tensor_registers(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
