// How flash_fwd is specialised for a problem and a GPU: pure functions of plain data.
#pragma once

#include <string>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/tuned.h"

namespace metal_attn {

struct FlashFwdSpecialisation {
  bool tensor_tiles;  // flash_fwd_tensor.metal's, of csrc/tiles/flash_fwd_tensor.cpp
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int v_slice;                // columns of v and out that one threadgroup owns
  int row_fragments;          // 8-row fragments of queries a SIMD group owns
  int block_k;                // keys staged at a time
  int simdgroups;             // per threadgroup
  int column_simdgroups = 1;  // that share rows, with a part of the columns each
  bool q_in_registers;
  bool q_in_threadgroup;  // if in neither, it is read again for every block
  bool kv_staged = true;  // in threadgroup memory; else each SIMD group reads K and V itself
  bool wide_loads;        // as many columns of k and v at a time as make 16 bytes
  bool wide_rotary;       // and of k while it is rotated
  bool row_pairs;         // two neighbouring elements of q at a time
  FlashFwdFeatures features;
  const TileRow* row;  // of a table that has the tile; null: it is estimated

  int block_q() const { return 8 * row_fragments * simdgroups / column_simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int v_slices() const { return (head_dim_v + v_slice - 1) / v_slice; }
  Tile tile() const;
  int registers() const;          // of a thread, 32 bits each: an estimate
  int threadgroup_bytes() const;  // exact: what the shader declares
  const char* kernel() const { return tensor_tiles ? "flash_fwd_tensor" : "flash_fwd"; }
};

// Every tile that fits in threadgroup memory, whatever registers it takes.
void for_each_tile(const FlashFwdSpecialisation& like,
                   const TileVisitor<FlashFwdSpecialisation>& visit);

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem, const Gpu& gpu);

Defines flash_fwd_defines(const FlashFwdSpecialisation& specialisation);

// The choice and its reasons in one sentence or two, for `explain`.
std::string describe_choice(const FlashFwdSpecialisation& specialisation, const Gpu& gpu);

}  // namespace metal_attn
