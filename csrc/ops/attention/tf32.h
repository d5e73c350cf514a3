// Whether float32 may be multiplied as TF32, with operands of 11 significant bits. Nothing allows
// it but the caller.
#pragma once

#include <string>

#include "csrc/problem/element.h"

namespace metal_attn {

// By the last metal_attn_allow_tf32, or else by TORCH_METAL_ATTN_TF32. Throws std::invalid_argument
// for a TORCH_METAL_ATTN_TF32 that is neither off nor on.
bool tf32_allowed();

// "TF32 is not allowed", or what allows it.
std::string tf32_reason();

// Of a kernel that multiplies float32 on tensor tiles, what it does and why; or else "".
std::string describe_tf32(Element element, bool tensor_tiles);

}  // namespace metal_attn
