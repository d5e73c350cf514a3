// Whether attention uses tensor tiles, and why not.
//
// A wrong layout of operands over the lanes gives finite, wrong numbers, and nobody here has seen a
// GPU with matrix units. So on mps, once a process, a probe compares the layout with the tables
// that the kernels rely on, and the first use of a pass computes a small problem with both kinds of
// tile. What fails uses 8x8 tiles.
#pragma once

#include <string>

#include "csrc/ops/attention/types.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// What is tried by itself: flash_fwd, and flash_bwd, for which flash_fwd must have passed.
enum class Pass { kForward, kBackward };

// Whether a pass on it uses tensor tiles in half precision. The first call tries them; in the
// simulator only the GPU that was told and the environment count. Throws std::invalid_argument for
// a TORCH_METAL_ATTN_TENSOR_TILES that is not off, auto or on.
bool uses_tensor_tiles(Backend& backend, Pass pass);

// Why not, in one line; "" if it does.
std::string tensor_tiles_problem(Pass pass, bool on_mps);

// "no tensor tiles, as ..." where a user may expect them, from M5 on or if they are insisted on;
// or else "". own: why the call cannot have them, or null. problem: tensor_tiles_problem's.
std::string missing_tensor_tiles(const char* own, const std::string& problem);

// Uses 8x8 tiles for the rest of the process, and says so on stderr.
void give_up_tensor_tiles(Pass pass, const std::string& why);

// The same for the forward with these texts only, and whether that was done.
void give_up_tensor_tiles(const FlexFeatures& flex, const std::string& why);
bool gave_up_tensor_tiles(const FlexFeatures& flex);

}  // namespace metal_attn
