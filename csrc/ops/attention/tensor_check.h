// The same small problem with both kinds of tile.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// How flash_fwd's and flash_bwd's tensor tiles differ from their 8x8 tiles beyond rounding, in one
// line; "" if they do not. device_type: torch's. float32: of problems in it, or of those in half
// precision.
std::string compare_forwards(Backend& backend, int32_t device_type, bool float32);
std::string compare_backwards(Backend& backend, int32_t device_type, bool float32);

}  // namespace metal_attn
