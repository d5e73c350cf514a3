// How the kernels of gradients are specialised: pure functions of plain data.
#pragma once

#include "csrc/tiles/table.h"

namespace metal_attn {

DEFINE_TILE(FlashBwdTile, FLASH_BWD_KNOBS)

enum class Gradient {
  kQ,
  kKv,
  kScores,  // and of what is added to them, or captured in functions of them
};

// A gradient kernel: a threadgroup owns rows of one side (keys for dk and dv, or else queries) and
// walks over blocks of the other; that of scores walks over tiles that share an element.
struct FlashBwdSpecialisation : Tiled<FlashBwdTile> {
  Gradient of;
  bool tensor_tiles;
  bool row_pairs;       // two neighbouring elements of the own rows at a time
  bool exact_delta;     // see flash_bwd_dq.metal
  int head_splits = 1;  // threadgroups that share the query heads of a KV head; no part of the tile

  bool dkv() const { return of == Gradient::kKv; }
  int block_rows() const { return 8 * row_fragments * simdgroups / column_simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int widest() const { return dkv() ? std::max(head_dim_qk, head_dim_v) : head_dim_qk; }
  // None of them is without columns: one of dq would be taken for the next head.
  int slices() const { return (widest() + slice - 1) / slice; }
  int slice_of(int columns) const;
  int qk_slice() const { return slice_of(head_dim_qk); }  // of dq, or dk, that a threadgroup owns
  int v_slice() const { return slice_of(head_dim_v); }    // columns of dv
  // True if the two tiles of the other side lie in one place, one after the other: in float32 they
  // are too wide for places of their own.
  bool tiles_shared() const;
  // True if SIMD groups that share rows exchange finished weights; else they add up scores.
  bool exchanges_weights() const { return dkv() && column_simdgroups > 1 && !tensor_tiles; }
  // How many parts of the rows of scores such SIMD groups compute, as queries are too few.
  int row_parts() const;
  // True if the rounding of the log-sum-exp would show in the weights: in float32, and in what the
  // other gradients that are float32's are computed from.
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

FlashBwdSpecialisation choose_flash_bwd(const FlashFwdProblem& problem, Gradient of,
                                        bool exact_delta, bool tensor_tiles, const Gpu& gpu);

}  // namespace metal_attn
