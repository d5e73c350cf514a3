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

struct FlashBwdBiasTile {
  FLASH_BWD_BIAS_KNOBS(KNOB_MEMBER)
};

// The kernel of what is added to scores: a threadgroup owns a tile of the bias in registers, and
// walks over the tiles of scores that share it.
struct FlashBwdBiasSpecialisation : FlashBwdBiasTile {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool wide_loads;
  bool wide_rotary;
  FlashFwdFeatures features;
  const TileConditions* defaults;  // of the default tile that this is

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int registers() const { return recorded_registers(defaults); }
  int threadgroup_bytes() const;

  static std::span<const DefaultRow<FlashBwdBiasTile>> table();
  TileQuestion question(int family) const;
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
