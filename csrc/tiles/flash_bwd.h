// The choice of the tiles of the gradient kernels: pure functions of plain data.
#pragma once

#include "csrc/tiles/table.h"

namespace metal_attn {

DEFINE_TILE(FlashBwdTile, FLASH_BWD_KNOBS)

enum class Gradient {
  kQ,
  kKv,
  kScores,  // for the gradients of a bias, slopes, and tensors that score_mod captures
};

// A threadgroup owns rows of one side (keys for dk and dv, queries otherwise) and loops over blocks
// of the other side. For kScores it loops over the tiles of scores that share an element.
struct FlashBwdSpecialisation : Tiled<FlashBwdTile> {
  Gradient gradient;
  bool tensor_tiles;
  bool row_pairs;       // two neighbouring elements of the owned rows are loaded at a time
  bool exact_delta;     // see flash_bwd_dq.metal
  int head_splits = 1;  // threadgroups that share a KV head's query heads; not part of the tile

  bool dkv() const { return gradient == Gradient::kKv; }
  int block_rows() const { return 8 * row_fragments * simdgroups / column_simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int widest() const { return dkv() ? std::max(head_dim_qk, head_dim_v) : head_dim_qk; }
  // Every slice has columns: an empty slice of dq would address the next head.
  int slices() const { return (widest() + slice - 1) / slice; }
  int slice_of(int columns) const;
  int qk_slice() const { return slice_of(head_dim_qk); }  // columns of dq or dk in a threadgroup
  int v_slice() const { return slice_of(head_dim_v); }    // columns of dv in a threadgroup
  // True if the two tiles of the other side use the same memory one after the other, because in
  // float32 they are too wide for separate arrays.
  bool tiles_shared() const;
  // True if SIMD groups that share rows exchange finished weights. Otherwise they add up scores.
  bool exchanges_weights() const { return dkv() && column_simdgroups > 1 && !tensor_tiles; }
  // The number of parts into which SIMD groups that exchange weights divide the rows of scores. It
  // exceeds 1 if a block has too few queries for them.
  int row_parts() const;
  // True if the rounding of the log-sum-exp would be visible in float32 gradients: those of float32
  // inputs, and those of a bias, slopes or a sink.
  bool normalised() const;
  const char* kernel() const { return named_rows().name; }

  int tile_queries() const { return dkv() ? block : block_rows(); }
  int tile_keys() const { return dkv() ? block_rows() : block; }
  int threadgroup_bytes() const;
  std::span<const DefaultRow<FlashBwdTile>> table() const { return named_rows().rows; }
  void cut();
  bool can_run() const;

 private:
  struct Kernel {
    const char* name;
    std::span<const DefaultRow<FlashBwdTile>> rows;
  };
  Kernel named_rows() const;
};

FlashBwdSpecialisation choose_flash_bwd(const FlashFwdProblem& problem, Gradient gradient,
                                        bool exact_delta, bool tensor_tiles, const Gpu& gpu);

}  // namespace metal_attn
