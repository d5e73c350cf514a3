// How the kernels of the gradients of q, k and v are specialised: pure functions of plain data.
#pragma once

#include <optional>
#include <span>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/table.h"

namespace metal_attn {

DEFINE_TILE(FlashBwdTile, FLASH_BWD_KNOBS)

// A gradient kernel: a threadgroup owns rows of one side (queries for dq, keys for dk and dv) and
// walks over blocks of the other.
struct FlashBwdSpecialisation : Tiled<FlashBwdTile> {
  bool tensor_tiles;
  bool row_pairs;       // two neighbouring elements of the own rows at a time
  bool dkv;             // the kernel of dk and dv, or that of dq
  bool exact_delta;     // see flash_bwd_dq.metal
  int head_splits = 1;  // threadgroups that share the query heads of a KV head; no part of the tile

  int block_rows() const { return 8 * row_fragments * simdgroups / column_simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int qk_slice() const { return slice(head_dim_qk); }  // of dq, or of dk, that a threadgroup owns
  int v_slice() const { return slice(head_dim_v); }    // columns of dv
  int slice(int columns) const;
  // Whether SIMD groups that share rows exchange finished weights; else they add up scores.
  bool exchanges_weights() const;
  // How many parts of the rows of scores such SIMD groups compute, as queries are too few.
  int row_parts() const;
  // Whether the rounding of the log-sum-exp would show in the weights: in float32, and in what the
  // other gradients that are float32's are computed from.
  bool normalised() const;
  int threadgroup_bytes() const;
  const char* kernel() const;

  std::span<const DefaultRow<FlashBwdTile>> table() const;
  // Takes a row's tile, cut to this problem. Returns whether the kernel can run it.
  bool take(const FlashBwdTile& tile);
  bool can_run() const;
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta, bool tensor_tiles,
                                                       const Gpu& gpu);

// How many threadgroups of this tile should share the query heads of a KV head, which they divide.
int flash_bwd_head_splits(const FlashBwdSpecialisation& s, const FlashFwdProblem& problem,
                          const Gpu& gpu);

Defines flash_bwd_defines(const FlashBwdSpecialisation& specialisation);

}  // namespace metal_attn
