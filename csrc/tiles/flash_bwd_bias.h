// How the kernel of the gradient of what is added to scores is specialised.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/table.h"

namespace metal_attn {

DEFINE_TILE(FlashBwdBiasTile, FLASH_BWD_BIAS_KNOBS)

// The kernel of what is added to scores: a threadgroup owns a tile of the bias in registers, and
// walks over the tiles of scores that share it.
struct FlashBwdBiasSpecialisation : Tiled<FlashBwdBiasTile> {
  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int threadgroup_bytes() const;

  static std::span<const DefaultRow<FlashBwdBiasTile>> table();
  // Takes a row's tile, cut to this problem. Returns whether the kernel can run it.
  bool take(const FlashBwdBiasTile& tile);
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem,
                                                                const Gpu& gpu);

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& specialisation);

// Into how many parts the walk over `shared` tiles of scores is split, of each of `owned` tiles of
// the bias. At least 1, and at most `shared` unless that is 0.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared);

}  // namespace metal_attn
