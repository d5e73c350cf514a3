// How the kernel of decoding is specialised for a problem and a GPU, and into how many parts keys
// are split: pure functions of plain data.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/tuned.h"

namespace metal_attn {

// Decoding: a threadgroup owns query heads of one KV head and a part of the keys.
struct FlashDecodeSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int row_fragments;      // 8-row fragments of queries that are worked on at a time
  int key_fragments;      // 8-key fragments of a SIMD group's block
  int key_simdgroups;     // per threadgroup, with different keys
  int column_simdgroups;  // with the same keys and different columns
  bool wide_loads;
  bool v_in_k;      // v is the first columns of k
  bool v_first;     // loaded before the scores
  int vector_rows;  // of which values are summed up without the matrix unit; 0: of none
  int key_lanes;    // that share a value's row then
  FlashFwdFeatures features;
  const TileRow* row;  // of a table that has the tile; null: it is estimated

  int rows() const { return vector_rows > 0 ? vector_rows : 8 * row_fragments; }
  // Tiles that so many rows fill; the keys are read for each.
  int64_t passes(int64_t all_rows) const { return (all_rows + rows() - 1) / rows(); }
  static const char* kernel() { return "flash_decode"; }
  int step_keys() const { return 8 * key_fragments * key_simdgroups; }
  int threads() const { return 32 * key_simdgroups * column_simdgroups; }
  Tile tile() const;
  int registers() const;
  int threadgroup_bytes() const;
};

// Every tile that fits in threadgroup memory, whatever registers it takes.
void for_each_tile(const FlashDecodeSpecialisation& like,
                   const TileVisitor<FlashDecodeSpecialisation>& visit);

// `rows`: queries of all heads that share a KV head.
FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k, const Gpu& gpu);

// Into how many parts the keys are split. `groups`: threadgroups without splits; `rows`: of each;
// `keys`: that one sequence reads, at most; `cores`: of the GPU. At least 1, and none of them is
// empty at `keys`.
int64_t flash_decode_splits(const FlashDecodeSpecialisation& specialisation, int64_t groups,
                            int64_t rows, int64_t keys, int cores);

Defines flash_decode_defines(const FlashDecodeSpecialisation& specialisation, bool split);

std::string describe_choice(const FlashDecodeSpecialisation& specialisation, int64_t rows,
                            int64_t row_groups, int64_t splits, const Gpu& gpu);

}  // namespace metal_attn
