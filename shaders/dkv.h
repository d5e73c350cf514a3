// Shared by flash_bwd_dkv and flash_bwd_dkv_tensor: a threadgroup's keys, the weights and gradients
// of transposed scores, and the stores of results.
#pragma once

#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "parts.h"

#ifndef HEAD_SPLITS
#define HEAD_SPLITS 1
#endif

// The type of the results. With HEAD_SPLITS they are parts, which flash_bwd_sum adds up.
using Result = conditional_t<(HEAD_SPLITS > 1), float, ELEMENT>;

constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_K = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
// A SIMD group's share of the columns.
constant constexpr int OWN_DK_COLUMNS = DK_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int OWN_DV_COLUMNS = DV_SLICE / COLUMN_SIMDGROUPS;

using DkTile = RegisterTile<float, ROW_FRAGMENTS, OWN_DK_COLUMNS / FRAGMENT>;
using DvTile = RegisterTile<float, ROW_FRAGMENTS, OWN_DV_COLUMNS / FRAGMENT>;

// A threadgroup's BLOCK_K keys of one KV head, its slice of dk's and dv's columns and its part of
// the query heads; and a SIMD group's share of the keys and columns.
struct DkvKeys {
  int batch;
  int kv_head;
  int slice;
  int split;      // of the query heads
  int tile_key;   // the threadgroup's first key
  int first_key;  // the SIMD group's first key
  int part;       // of the columns, if SIMD groups share rows
  bool has_keys;  // whether any of the threadgroup's keys exists
  Sequence sequence;
  Visibility visible;
  SeenRows seen;  // the queries that see the SIMD group's keys
  Output<Result, HEAD_DIM_QK, DK_SLICE, SLICES> dk_rows;
  Output<Result, HEAD_DIM_V, DV_SLICE, SLICES> dv_rows;

  // Returns false, after writing zeros or NaN, if there is nothing to compute.
  METAL_FUNC bool begin(thread const FlashInputs& inputs, device Result* dk, device Result* dv,
                        constant FlashBwdParams& params, uint3 position, uint3 grid,
                        ushort thread_index, ushort simdgroup) thread {
    GridPlace place;
    place.reset<FLEX_KV_BLOCK, BLOCK_K, SLICES * HEAD_SPLITS>(inputs, params.problem, position,
                                                              grid);
    batch = place.batch;
    split = place.column % HEAD_SPLITS;
    kv_head = place.column / HEAD_SPLITS / SLICES;
    slice = place.column / HEAD_SPLITS % SLICES;
    sequence = inputs.sequence(batch, params.problem);
    dk_rows.reset(dk + split * params.dk_split_stride, params.dk_strides, batch, kv_head,
                  sequence.kv_start, slice);
    dv_rows.reset(dv + split * params.dv_split_stride, params.dv_strides, batch, kv_head,
                  sequence.kv_start, slice);
    if (sequence.is_left_out(batch, params.problem)) {
      fill(place.tile * THREADS + thread_index, grid.x * THREADS);
      return false;
    }
    tile_key = place.tile * BLOCK_K;
    first_key = tile_key + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
    part = simdgroup % COLUMN_SIMDGROUPS;
    visible.reset(sequence, params.problem);
    has_keys = tile_key <= last() && tile_key + BLOCK_K > sequence.first_key;
    const int end = first_key + SIMDGROUP_ROWS;
    const bool no_keys = first_key > last() || end <= sequence.first_key;
    seen.union_range.begin = visible.queries_of(max(first_key, sequence.first_key)).begin;
    seen.union_range.end = no_keys ? 0 : visible.queries_of(min(end - 1, last())).end;
    seen.intersection_range.begin = visible.queries_of(end - 1).begin;
    seen.intersection_range.end = visible.queries_of(first_key).end;
    // All rows of dk and dv are written, including the rows of unused keys.
    return !(VARLEN || FLEX_ORDER) || tile_key < sequence.kv_rows;
  }

  METAL_FUNC int last() const thread { return sequence.kv_length - 1; }

  // Rows `first`, `first + step`, ... of a sequence that is left out.
  METAL_FUNC void fill(int first, int step) const thread {
    const float value = sequence.impossible ? NAN : 0.0f;
    dk_rows.fill(value, first, sequence.kv_rows, step);
    dv_rows.fill(value, first, sequence.kv_rows, step);
  }

  // The queries that see any of the threadgroup's keys; with lists of blocks, all queries.
  METAL_FUNC Range queries() const thread {
    Range range;
    range.begin = visible.queries_of(max(tile_key, sequence.first_key)).begin;
    range.end = has_keys ? visible.queries_of(min(tile_key + BLOCK_K - 1, last())).end : 0;
    if (BLOCK_LISTS) { range.end = sequence.q_length; }
    return range;
  }

  // lane_key: the key of the lane's row in row fragment 0.
  template <int ROWS, int COLUMNS>
  METAL_FUNC void hide_unseen(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                              thread RegisterTile<float, ROWS, COLUMNS>& slopes, int block,
                              int lane_key, int lane_query) const thread {
    if (seen.all_in(block, BLOCK_Q)) { return; }
    visible.apply<true>(scores, lane_key, lane_query);
    if (FLEX_DERIVATIVES) {
      // Slopes may be infinite at the score 0 of queries that do not exist.
      visible.apply<true>(slopes, lane_key, lane_query, 0.0f);
    }
  }

  METAL_FUNC void write(thread const DkTile& dk_tile, thread const DvTile& dv_tile, int row,
                        int column, constant FlashParams& params) const thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const int key = first_key + row + i * FRAGMENT;
      if (key >= sequence.kv_rows) { continue; }
      // Keys that do not exist have no gradient, whatever their memory holds.
      const bool exists = key >= sequence.first_key && key <= last();
      const Fragment<float> zero = Fragment<float>(0.0f, 0.0f);
      UNROLL
      for (short d = 0; d < OWN_DK_COLUMNS / FRAGMENT; d++) {
        dk_rows.store(key, part * OWN_DK_COLUMNS + column + column_offset(d),
                      exists ? dk_tile.fragments[i][d] * params.softmax_scale : zero);
      }
      UNROLL
      for (short d = 0; d < OWN_DV_COLUMNS / FRAGMENT; d++) {
        dv_rows.store(key, part * OWN_DV_COLUMNS + column + column_offset(d),
                      exists ? dv_tile.fragments[i][d] : zero);
      }
    }
  }
};

// Scores become weights. `statistics` returns lse_log2, weight_factor and delta of the lane's two
// queries in column fragment j.
template <int ROWS, int COLUMNS, typename Statistics>
METAL_FUNC void exponentiate(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                             thread const Statistics& statistics) {
  UNROLL
  for (short j = 0; j < COLUMNS; j++) {
    const Fragment<float> lse_log2 = statistics.lse_log2(j);
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      scores.fragments[i][j] = fast::exp2(scores.fragments[i][j] - lse_log2);
    }
    if (NORMALISED) {
      const Fragment<float> factor = statistics.weight_factor(j);
      UNROLL
      for (short i = 0; i < ROWS; i++) { scores.fragments[i][j] *= factor; }
    }
  }
}

// d loss / d weight becomes d loss / d score.
template <int ROWS, int COLUMNS, typename Statistics>
METAL_FUNC void differentiate(thread RegisterTile<float, ROWS, COLUMNS>& gradients,
                              thread const RegisterTile<float, ROWS, COLUMNS>& weights,
                              thread const Statistics& statistics) {
  UNROLL
  for (short j = 0; j < COLUMNS; j++) {
    const Fragment<float> delta = statistics.delta(j);
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      gradients.fragments[i][j] = weights.fragments[i][j] * (gradients.fragments[i][j] - delta);
    }
  }
}
