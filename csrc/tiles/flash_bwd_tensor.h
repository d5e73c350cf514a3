// Tensor tiles of the gradients of q, k and v: which are chosen, and what they take.
#pragma once

#include "csrc/tiles/flash_bwd.h"

namespace metal_attn {

FlashBwdSpecialisation choose_flash_bwd_tensor(const FlashFwdProblem& problem, bool dkv,
                                               bool exact_delta);

// Columns of a gradient of so many that a threadgroup owns.
int tensor_slice(const FlashBwdSpecialisation& specialisation, int columns);

// Of a thread: an estimate.
int tensor_registers(const FlashBwdSpecialisation& specialisation);

int tensor_threadgroup_bytes(const FlashBwdSpecialisation& specialisation);

}  // namespace metal_attn
