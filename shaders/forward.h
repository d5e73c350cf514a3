// What the forward kernels share: the tile of queries of a threadgroup, and where its results go.
#pragma once

#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "softmax.h"

constant constexpr int V_SLICES = (HEAD_DIM_V + V_SLICE - 1) / V_SLICE;
constant constexpr int V_FRAGMENTS = V_SLICE / FRAGMENT;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

// BLOCK queries of one head, and a slice of the columns of v and out.
template <int BLOCK>
struct ForwardTile {
  QueryTilePlace<BLOCK, V_SLICES> place;
  Sequence sequence;
  Visibility visible;
  int last_query;
  Output<ELEMENT, HEAD_DIM_V, V_SLICE> out_rows;
  device float* lse_rows;

  // Returns whether there is anything to compute. If not, it has written the tile's results.
  METAL_FUNC bool begin(thread const FlashInputs& inputs, constant FlashFwdParams& params,
                        device ELEMENT* out, device float* softmax_lse, uint3 position, uint3 grid,
                        ushort thread_index) thread {
    constant FlashParams& problem = params.problem;
    place.reset(inputs, problem, position, grid);
    sequence = inputs.sequence(place.batch, problem);
    last_query = sequence.q_length - 1;
    out_rows.reset(out, params.out_strides, place.batch, place.head, sequence.q_start, place.slice);
    lse_rows = softmax_lse +
               (row_offset(params.lse_strides, place.batch, place.head, 0) + sequence.q_start);
    if (sequence.is_left_out(place.batch, problem)) {
      fill(place.number * THREADS + thread_index, grid.x * THREADS);
      return false;
    }
    visible.reset(sequence, problem);
    return !(VARLEN || FLEX_ORDER) || place.first_query <= last_query;
  }

  // Rows `first`, `first + step`, ... of a sequence that is left out.
  METAL_FUNC void fill(int first, int step) const thread {
    out_rows.fill(sequence.impossible ? NAN : 0.0f, first, sequence.q_length, step);
    for (int query = first; place.slice == 0 && query < sequence.q_length; query += step) {
      lse_rows[query] = sequence.impossible ? NAN : -INFINITY;
    }
  }

  // The keys that any of its queries sees.
  METAL_FUNC Range keys() const thread {
    Range range;
    range.begin = visible.keys_of(place.first_query).begin;
    range.end = visible.keys_of(min(place.first_query + BLOCK - 1, last_query)).end;
    return range;
  }
};

// The sum of a row's weights, of which keys_sum is that of the keys.
METAL_FUNC float with_sink(float keys_sum, float sink_weight) {
  return SINK ? keys_sum + sink_weight : keys_sum;
}

// The rows of a tile whose scores arrive block by block.
template <int ROWS>
struct RowsSoftmax {
  OnlineSoftmax rows[ROWS];

  METAL_FUNC void reset(thread const FlashInputs& inputs, int head) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      rows[i].reset(SINK ? inputs.sink_log2(head) : MASKED_ROW_MAX);
    }
  }

  // Of row i's sink, relative to its maximum.
  METAL_FUNC float sink_weight(short i, thread const FlashInputs& inputs, int head) const thread {
    return SINK ? inputs.sink_weight(head, rows[i].row_max) : 0.0f;
  }

  // Scores become weights. corrections[i]: the factor of row i's earlier sums.
  template <int COLUMNS>
  METAL_FUNC void update(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                         thread float* corrections) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      corrections[i] = rows[i].template update<COLUMNS>(scores.fragments[i]);
    }
  }
};
