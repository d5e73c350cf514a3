// metal_attn::flash_fwd and flash_varlen_fwd: attention forward, dense and packed.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>

#include "csrc/problem/attention.h"
#include "csrc/runtime/backend.h"
#include "csrc/tiles/flash_fwd.h"

namespace metal_attn {

// A call that passed every check, and the kernel that was chosen for it.
struct ChosenFlashFwd {
  FlashFwdCall call;
  FlashFwdSpecialisation specialisation;
  std::array<uint32_t, 3> threadgroups;
};

// tensor_tiles: whether they may be chosen. Throws std::invalid_argument.
ChosenFlashFwd check_and_choose(const FlashFwdArguments& arguments, bool tensor_tiles = false);

// What flash_fwd returns, uninitialised.
Tensor new_out(const FlashFwdArguments& arguments, int64_t head_dim_v);
Tensor new_lse(const FlashFwdArguments& arguments);

// Returns out, of q's shape but for its last size, like q in dtype and in order of dimensions, and
// softmax_lse, (B, Hq, Lq) or (Hq, Tq), float32, contiguous. Throws std::invalid_argument for what
// the schema's documentation does not allow.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments, Backend& backend);
// With or without tensor tiles, whatever the backend's are worth.
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments, Backend& backend,
                                     bool tensor_tiles);

}  // namespace metal_attn
