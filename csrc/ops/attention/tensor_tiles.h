// Decides if attention uses tensor tiles.
//
// A wrong layout of operands over the lanes would give finite, wrong numbers, and we have no GPU
// with matrix units. So on mps, once per process, a probe compares the layout with the tables of
// the kernels, and the first use of a pass computes small problems with both kinds of tile. If a
// comparison fails, attention uses 8x8 tiles.
#pragma once

#include <cstdlib>
#include <string_view>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

enum class Pass { kForward, kBackward };

// A comparison of both kinds of tile. The backward is compared only if the comparison of the
// forward passed, and float32 only if the comparison in half precision passed.
struct TileComparison {
  Pass pass;
  bool float32;
};

// Compares tensor tiles with 8x8 tiles in a few small problems, in float32 or in half precision.
// Returns a line about a difference beyond rounding, or "". device_type: torch's number.
std::string compare_tiles(Backend& backend, int32_t device_type, Pass pass, bool float32);

// True if a pass on the backend uses tensor tiles for these queries. The first call on mps runs the
// comparisons. In the simulator only the GPU's name and the environment decide. Throws
// std::invalid_argument for an unknown setting.
bool uses_tensor_tiles(const Tensor& q, Backend& backend, Pass pass);

// The reason in one line not to use tensor tiles, or "".
std::string tensor_tiles_problem(const Tensor& q, Pass pass);

// "no tensor tiles, as ..." from M5 on or with the setting on. Otherwise "". why_not: why the call
// cannot have tensor tiles, or null. problem: the result of tensor_tiles_problem.
std::string missing_tensor_tiles(const char* why_not, const std::string& problem);

// The reason why a forward or its gradients have only 8x8 tiles, or null.
const char* no_tensor_tiles(const FlashFwdProblem& problem);
const char* no_tensor_gradients(const FlashFwdProblem& problem);

// The reason if the GPU has refused every tensor tile of a problem, and the function that prints a
// warning about it once. user: what uses 8x8 tiles now, such as "attention".
inline constexpr char kTensorTilesRefused[] = "this GPU refused every tensor tile for this problem";
void warn_tensor_tiles_refused(const std::string& user, const std::string& why);

// Returns run(true) if the pass uses tensor tiles and the GPU does not refuse them, or run(false).
template <class Run>
auto with_tensor_tiles(const Tensor& q, Backend& backend, Pass pass, const char* user,
                       const Run& run) {
  if (!uses_tensor_tiles(q, backend, pass)) { return run(false); }
  try {
    return run(true);
  } catch (const CompileError& error) {
    auto result = run(false);
    warn_tensor_tiles_refused(user, error.why);
    return result;
  }
}

// The value of an environment variable, or `by_default` if it is empty or unset.
inline std::string_view environment(const char* name, std::string_view by_default) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? by_default : value;
}

// True if float32 may be multiplied as TF32, with operands of 11 significant bits. The last
// metal_attn_allow_tf32 decides, or TORCH_METAL_ATTN_TF32. Throws std::invalid_argument if the
// latter is neither off nor on.
bool tf32_allowed();

std::string tf32_reason();

// The rounding of a kernel that multiplies float32 on tensor tiles, or "" for other kernels.
std::string describe_tf32(Element element, bool tensor_tiles);

}  // namespace metal_attn
