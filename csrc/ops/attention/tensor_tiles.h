// Whether flash_fwd uses tensor tiles, and why not.
//
// A wrong layout of operands over the lanes gives finite, wrong numbers, and nobody here has seen a
// GPU with matrix units. So on mps, once a process, a probe compares the layout with the tables
// that the kernel relies on, and the first use computes a small problem with both kinds of tile.
// What fails uses 8x8 tiles.
#pragma once

#include <string>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// Whether flash_fwd on it uses tensor tiles in half precision. The first call tries them; in the
// simulator only the GPU that was told and the environment count. Throws std::invalid_argument for
// a TORCH_METAL_ATTN_TENSOR_TILES that is not off, auto or on.
bool uses_tensor_tiles(Backend& backend);

// Why not, in one line; "" if it does.
std::string tensor_tiles_problem(Backend& backend);
std::string tensor_tiles_problem(bool on_mps);

// Whether a user may expect tensor tiles: from M5 on, or if they are insisted on.
bool expects_tensor_tiles();

// Uses 8x8 tiles for the rest of the process, and says so on stderr.
void give_up_tensor_tiles(const std::string& why);

}  // namespace metal_attn
