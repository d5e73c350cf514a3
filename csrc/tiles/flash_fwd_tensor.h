// Tensor tiles of flash_fwd: which are chosen, and what they take.
#pragma once

#include "csrc/tiles/flash_fwd.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {

FlashFwdSpecialisation choose_flash_fwd_tensor(const FlashFwdProblem& problem);

// Of a thread: an estimate.
int tensor_registers(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
