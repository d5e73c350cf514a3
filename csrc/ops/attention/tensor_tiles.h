// Decides if attention uses tensor tiles, and says why not.
//
// A wrong layout of operands over the lanes gives finite, wrong numbers, and nobody here has seen a
// GPU with matrix units. So on mps, once a process, a probe compares the layout with the tables
// that the kernels rely on, and the first use of a pass computes a small problem with both kinds of
// tile. If one of them fails, 8x8 tiles are used.
#pragma once

#include <cstdlib>
#include <string_view>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// flash_fwd, or flash_bwd.
enum class Pass { kForward, kBackward };

// A comparison of both kinds of tile. The gradients need the forward's tensor tiles, and float32
// needs those of half precision.
struct TileComparison {
  Pass pass;
  bool float32;
};

// How a pass's tensor tiles differ from its 8x8 tiles beyond rounding in a few small problems, in
// one line; "" if they do not. device_type: torch's. float32: of problems in it, or of those in
// half precision.
std::string compare_tiles(Backend& backend, int32_t device_type, Pass pass, bool float32);

// True if a pass on the backend uses tensor tiles for these queries. The first call on mps tries
// them. In the simulator only the GPU's name and the environment decide; while launches are
// recorded, tensor_tiles_problem. Throws std::invalid_argument for an unknown setting.
bool uses_tensor_tiles(const Tensor& q, Backend& backend, Pass pass);

// Why not, in one line; "" if it does.
std::string tensor_tiles_problem(const Tensor& q, Pass pass);

// "no tensor tiles, as ..." if a user may expect them, which is from M5 on or if the setting is on;
// else "". why_not: why the call cannot have them, or null. problem: tensor_tiles_problem's.
std::string missing_tensor_tiles(const char* why_not, const std::string& problem);

// Why a forward has 8x8 tiles only, or its gradients; null: it may have others.
const char* no_tensor_tiles(const FlashFwdProblem& problem);
const char* no_tensor_gradients(const FlashFwdProblem& problem);

// Why a problem has 8x8 tiles if the GPU has refused each of its tensor tiles, and the function
// that says so on stderr, once.
inline constexpr char kTensorTilesRefused[] = "this GPU refused each of them for this problem";
void say_tensor_tiles_refused(const std::string& what, const std::string& why);

// The value of an environment variable, or `by_default` if it is empty or not set.
inline std::string_view environment(const char* name, std::string_view by_default) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? by_default : value;
}

// True if float32 may be multiplied as TF32, with operands of 11 significant bits: by the last
// metal_attn_allow_tf32, or else by TORCH_METAL_ATTN_TF32. Throws std::invalid_argument for a
// TORCH_METAL_ATTN_TF32 that is neither off nor on.
bool tf32_allowed();

// "TF32 is not allowed", or what allows it.
std::string tf32_reason();

// How a kernel that multiplies float32 on tensor tiles rounds, and why; "" for other kernels.
std::string describe_tf32(Element element, bool tensor_tiles);

}  // namespace metal_attn
