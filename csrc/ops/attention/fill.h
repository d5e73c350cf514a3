// What every kernel of attention is given: the problem as params, and the buffers that it reads.
#pragma once

#include "csrc/ops/attention/types.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
