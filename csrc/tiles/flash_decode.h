// The choice of flash_decode's tiles: pure functions of plain data.
#pragma once

#include "csrc/tiles/table.h"

namespace metal_attn {

DEFINE_TILE(FlashDecodeTile, FLASH_DECODE_KNOBS)

// A threadgroup owns query heads of one KV head and a part of the keys.
struct FlashDecodeSpecialisation : Tiled<FlashDecodeTile> {
  int64_t all_rows;  // queries of all heads that share a KV head
  bool v_in_k;       // v is the first columns of k

  // The rows that a SIMD group and a threadgroup process at a time.
  int tile_rows() const { return vector_rows > 0 ? vector_rows : 8 * row_fragments; }
  int rows_at_once() const { return tile_rows() * row_simdgroups(); }
  // How often the keys are read for `rows` rows.
  int64_t passes(int64_t rows) const { return (rows + rows_at_once() - 1) / rows_at_once(); }
  static const char* kernel() { return "flash_decode"; }
  // SIMD groups of a threadgroup that have different columns, keys or rows.
  int column_simdgroups() const;
  int key_simdgroups() const;
  int row_simdgroups() const;
  int step_keys() const { return 8 * key_fragments * key_simdgroups(); }
  int threads() const { return 32 * key_simdgroups() * column_simdgroups() * row_simdgroups(); }
  int key_lanes() const;  // lanes that share a row of v with VECTOR_ROWS
  int threadgroup_bytes(int row_simdgroups) const;

  static int tile_queries() { return 1; }  // the rows of a tile may lie in several blocks
  int tile_keys() const { return 8 * key_fragments; }
  int threadgroup_bytes() const { return threadgroup_bytes(row_simdgroups()); }
  static std::span<const DefaultRow<FlashDecodeTile>> table();
  TileConditions conditions(int family) const;
  void cut();
  bool can_run() const;
};

// `rows`: queries of all heads that share a KV head.
FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k, const Gpu& gpu);

}  // namespace metal_attn
