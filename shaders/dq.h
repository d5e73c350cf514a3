// Shared by flash_bwd_dq and flash_bwd_dq_tensor: a threadgroup's queries, the gradients of their
// scores, the check of delta, and the stores of results.
#pragma once

#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "parts.h"
#include "row_sums.h"

constant constexpr int DQ_SLICES = (HEAD_DIM_QK + DQ_SLICE - 1) / DQ_SLICE;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
// A SIMD group's share of the columns.
constant constexpr int OWN_DQ_COLUMNS = DQ_SLICE / COLUMN_SIMDGROUPS;
constant constexpr short PASSES = EXACT_DELTA ? 2 : 1;

using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using DqTile = RegisterTile<float, ROW_FRAGMENTS, OWN_DQ_COLUMNS / FRAGMENT>;

// A threadgroup's BLOCK_Q queries and its slice of dq's columns, and a SIMD group's part of both.
struct DqQueries {
  QueryTilePlace<BLOCK_Q, DQ_SLICES> place;
  Sequence sequence;
  Visibility visible;
  SeenRows seen;  // the keys that the SIMD group's queries see
  QueryStatistics statistics;
  Output<ELEMENT, HEAD_DIM_QK, DQ_SLICE> dq_rows;
  Output<float, 1, 1> delta_rows;       // EXACT_DELTA
  Output<float, 1, 1> normaliser_rows;  // NORMALISED
  const device float* dlse;             // DLSE
  Offset first_dlse;
  Offset dlse_stride;
  int last_query;
  int first_query;  // of the lane's row fragment 0
  int part;         // of the columns, if SIMD groups share rows

  // Returns false, after writing zeros or NaN, if there is nothing to compute.
  METAL_FUNC bool begin(thread const FlashInputs& inputs, thread const BackwardBuffers& buffers,
                        device ELEMENT* dq, constant FlashBwdParams& params, uint3 position,
                        uint3 grid, ushort thread_index, ushort simdgroup, ushort lane) thread {
    place.reset(inputs, params.problem, position, grid);
    sequence = inputs.sequence(place.batch, params.problem);
    const int batch = place.batch;
    const int head = place.head;
    const int first = sequence.q_start;
    dq_rows.reset(dq, params.dq_strides, batch, head, first, place.slice);
    if (EXACT_DELTA) {
      delta_rows.reset(buffers.exact_delta, params.lse_strides, batch, head, first, 0);
    }
    WHEN(NORMALISED,
         normaliser_rows.reset(buffers.normalisers, params.lse_strides, batch, head, first, 0));
    if (DLSE) {
      dlse = buffers.dlse;
      first_dlse = row_offset(params.dlse_strides, batch, head, first);
      dlse_stride = Offset(params.dlse_strides.row);
    }
    if (sequence.is_left_out(batch, params.problem)) {
      fill(place.number * THREADS + thread_index, grid.x * THREADS);
      return false;
    }
    last_query = sequence.q_length - 1;
    if ((VARLEN || FLEX_ORDER) && place.first_query > last_query) { return false; }
    const int simdgroup_query = place.first_query + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
    first_query = simdgroup_query + fragment_row(lane);
    part = simdgroup % COLUMN_SIMDGROUPS;
    visible.reset(sequence, params.problem);
    seen.reset(visible, simdgroup_query, SIMDGROUP_ROWS, last_query);
    statistics = buffers.statistics(params.lse_strides, place.batch, place.head, sequence);
    return true;
  }

  // Rows `first`, `first + step`, ... of a sequence that is left out.
  METAL_FUNC void fill(int first, int step) const thread {
    const float value = sequence.impossible ? NAN : 0.0f;
    dq_rows.fill(value, first, sequence.q_length, step);
    if (EXACT_DELTA && place.slice == 0) { delta_rows.fill(value, first, sequence.q_length, step); }
    if (NORMALISED && place.slice == 0) {
      normaliser_rows.fill(1.0f, first, sequence.q_length, step);
    }
  }

  // The keys that any query of the threadgroup sees.
  METAL_FUNC Range keys() const thread {
    Range range;
    range.begin = visible.keys_of(place.first_query).begin;
    range.end = visible.keys_of(min(place.first_query + BLOCK_Q - 1, last_query)).end;
    // Blocks rounds the begin down, which would put the begin of an empty range before its end.
    if (!BLOCK_LISTS && range.begin >= range.end) { range.end = 0; }
    return range;
  }

  METAL_FUNC void hide_unseen(thread ScoreTile& scores, thread ScoreTile& slopes, int block,
                              int column) const thread {
    if (seen.all_in(block, BLOCK_K)) { return; }
    visible.apply<false>(scores, first_query, block + column);
    if (FLEX_DERIVATIVES) {
      // Slopes may be infinite at the score 0 of keys that do not exist.
      visible.apply<false>(slopes, first_query, block + column, 0.0f);
    }
  }

  // The query of the lane's row fragment i.
  METAL_FUNC int query(short i) const thread { return existing_row(first_query, i, last_query); }
  METAL_FUNC bool exists(short i) const thread { return first_query + i * FRAGMENT <= last_query; }
};

// The statistics of a lane's rows, and with EXACT_DELTA sums over their keys.
struct DqRows {
  float lse_log2s[ROW_FRAGMENTS];
  float deltas[ROW_FRAGMENTS];  // in the second pass, the errors of delta
  RowSums sums[ROW_FRAGMENTS];
  float weight_factors[ROW_FRAGMENTS];  // NORMALISED

  METAL_FUNC void load(thread const DqQueries& queries) thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      lse_log2s[i] = queries.statistics.lse_log2(queries.query(i));
      deltas[i] = queries.statistics.delta_of(queries.query(i));
      sums[i].reset();
      weight_factors[i] = 1.0f;
    }
  }

  // d loss / d weight becomes d loss / d score.
  METAL_FUNC void differentiate(thread ScoreTile& gradients,
                                thread const ScoreTile& scores) thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      Fragment<float> block_weights = Fragment<float>(0.0f, 0.0f);
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const Fragment<float> weight = fast::exp2(scores.fragments[i][j] - lse_log2s[i]);
        gradients.fragments[i][j] = weight * (gradients.fragments[i][j] - deltas[i]);
        if (NORMALISED) { block_weights += weight; }
      }
      if (EXACT_DELTA) { sums[i].add<KEY_FRAGMENTS>(gradients.fragments[i], block_weights); }
    }
  }

  // Call it after the first pass. Stores delta and the normalisers. Returns true if the error of
  // delta is too large in any row of the SIMD group. column: the lane's column.
  METAL_FUNC bool check_delta(thread const DqQueries& queries, thread const FlashInputs& inputs,
                              ushort column) thread {
    const float sink = SINK ? float(inputs.learnable_sink[queries.place.head]) : 0.0f;
    const bool writes = queries.place.slice == 0 && queries.part == 0 && column == 0;
    bool too_large = false;
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const int query = queries.query(i);
      const float dlse =
          DLSE ? queries.dlse[queries.first_dlse + Offset(query) * queries.dlse_stride] : 0.0f;
      const RowError error = sums[i].merge_lanes(queries.statistics.lse_of(query), lse_log2s[i],
                                                 deltas[i], sink, dlse);
      weight_factors[i] = error.factor;
      too_large = too_large || fabs(error.delta_error) > TOLERATED * sums[i].sizes;
      if (writes && queries.exists(i)) {
        queries.delta_rows.store(query, 0, Fragment<float>(deltas[i] + error.delta_error, 0.0f));
        if (NORMALISED) {
          queries.normaliser_rows.store(query, 0, Fragment<float>(error.normaliser, 0.0f));
        }
      }
      deltas[i] = error.delta_error;
    }
    return simd_max(too_large ? 1.0f : 0.0f) > 0.0f;
  }

  METAL_FUNC void write(thread const DqTile& dq_tile, thread const DqQueries& queries, int column,
                        float softmax_scale) const thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (!queries.exists(i)) { continue; }
      const float scale = NORMALISED ? softmax_scale * weight_factors[i] : softmax_scale;
      UNROLL
      for (short d = 0; d < OWN_DQ_COLUMNS / FRAGMENT; d++) {
        queries.dq_rows.store(queries.first_query + i * FRAGMENT, column + column_offset(d),
                              dq_tile.fragments[i][d] * scale);
      }
    }
  }
};

// True if any SIMD group of the threadgroup has a true vote. votes: one for each SIMD group.
METAL_FUNC bool any_simdgroup(bool vote, threadgroup float* votes, ushort simdgroup, ushort lane) {
  if (lane == 0) { votes[simdgroup] = vote ? 1.0f : 0.0f; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float any = 0.0f;
  UNROLL
  for (short i = 0; i < SIMDGROUPS; i++) { any = max(any, votes[i]); }
  return any > 0.0f;
}
