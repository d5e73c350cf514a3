// How the kernels of attention are specialised for a problem, and the forward's grid: pure
// functions of plain data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "csrc/ops/attention/types.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

struct FlashFwdSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int v_slice;        // columns of v and out that one threadgroup owns
  int row_fragments;  // 8-row fragments of queries a SIMD group owns
  int block_k;        // keys staged at a time
  int simdgroups;     // per threadgroup
  bool q_in_registers;
  bool wide_loads;   // as many columns of k and v at a time as make 16 bytes
  bool wide_rotary;  // and of k while it is rotated
  FlashFwdFeatures features;

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int v_slices() const { return (head_dim_v + v_slice - 1) / v_slice; }
  int registers() const;          // an estimate: 32-bit registers of a thread that hold tiles
  int threadgroup_bytes() const;  // exact: the shader's static K and V tiles
};

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem);

Defines flash_fwd_defines(const FlashFwdSpecialisation& specialisation);

// Throws std::invalid_argument for a grid that Metal cannot count.
std::array<uint32_t, 3> flash_fwd_threadgroups(const FlashFwdCall& call,
                                               const FlashFwdSpecialisation& specialisation);

// The choice and its reasons in one sentence or two, for `explain`.
std::string describe_choice(const FlashFwdSpecialisation& specialisation);

// A gradient kernel: a threadgroup owns rows of one side (queries for dq, keys for dk and dv) and
// walks over blocks of the other.
struct FlashBwdSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int slices;         // over the grid, of the gradients' columns
  int row_fragments;  // 8-row fragments that a SIMD group owns
  int block;          // rows of the other side staged at a time
  int simdgroups;
  bool rows_in_registers;
  bool wide_loads;
  bool wide_rotary;
  bool dkv;          // the kernel of dk and dv, or that of dq
  bool exact_delta;  // see flash_bwd_dq.metal
  FlashFwdFeatures features;

  int block_rows() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int qk_slice() const;  // columns of dq, or of dk, that a threadgroup owns
  int v_slice() const;   // columns of dv
  // Whether the rounding of the log-sum-exp would show in the weights: in float32, and in what the
  // other gradients that are float32's are computed from.
  bool normalised() const;
  int registers() const;
  int threadgroup_bytes() const;
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta);
std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta);

Defines flash_bwd_defines(const FlashBwdSpecialisation& specialisation);

// The kernel of what is added to scores: a threadgroup owns a tile of the bias in registers, and
// walks over the tiles of scores that share it.
struct FlashBwdBiasSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int row_fragments;  // 8-row fragments of queries that a SIMD group owns
  int block_k;        // keys of a tile
  int simdgroups;
  bool rows_in_registers;
  bool wide_loads;
  bool wide_rotary;
  FlashFwdFeatures features;

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int registers() const;
  int threadgroup_bytes() const;
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem);

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& specialisation);

// Into how many parts the walk over `shared` tiles of scores is split, of each of `owned` tiles of
// the bias. At least 1, and at most `shared` unless that is 0.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared);

}  // namespace metal_attn
