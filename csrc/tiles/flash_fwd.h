// The choice of flash_fwd's tiles: pure functions of plain data.
#pragma once

#include "csrc/tiles/shared.h"

namespace metal_attn {

DEFINE_TILE(FlashFwdTile, FLASH_FWD_KNOBS)

struct FlashFwdSpecialisation : Tiled<FlashFwdTile> {
  bool tensor_tiles;      // use flash_fwd_tensor.metal
  int row_fragments = 1;  // 8-row fragments of queries per SIMD group: 2 with tensor tiles
  bool row_pairs;         // two neighbouring elements of q are loaded at a time

  int block_q() const { return 8 * row_fragments * simdgroups / column_simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int v_slices() const { return (head_dim_v + v_slice - 1) / v_slice; }
  int slice_unit() const { return tensor_tiles ? kTensorSpan : 8; }
  const char* kernel() const { return tensor_tiles ? "flash_fwd_tensor" : "flash_fwd"; }

  int tile_queries() const { return block_q(); }
  int tile_keys() const { return block_k; }
  int threadgroup_bytes() const;
  std::span<const DefaultRow<FlashFwdTile>> table() const;
  TileConditions conditions(int family) const;
  void cut();
  bool can_run() const;
};

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem, bool tensor_tiles,
                                        const Gpu& gpu);

}  // namespace metal_attn
