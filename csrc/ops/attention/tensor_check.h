// The same small problem with both kinds of tile.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// How flash_fwd's tensor tiles differ from its 8x8 tiles beyond rounding, in one line; "" if they
// do not. device_type: torch's.
std::string compare_kinds_of_tile(Backend& backend, int32_t device_type);

}  // namespace metal_attn
