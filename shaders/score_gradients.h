// Shared by flash_bwd_bias and flash_bwd_captures: queries and the gradients of their scores.
#pragma once

#include "backward.h"
#include "own_rows.h"

constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int V_PAIRS_BYTES = BLOCK_K * padded(V_COLUMNS) * sizeof(ELEMENT);
constant constexpr int K_PAIRS_BYTES =
    with_shared(BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT), V_PAIRS_BYTES);

using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using QueryTile = OwnRows<Queries, QK_COLUMNS>;
using GradientTile = OwnRows<OutGradients, V_COLUMNS>;

// Removes the fastest dimension, which has `size` positions, from `index`. Returns its position.
METAL_FUNC int pop_dimension(thread int64_t& index, int size) {
  const int position = int(index % size);
  index /= size;
  return position;
}

// A lane's rows of q and dout with their statistics.
struct OwnQueries {
  QueryTile q_tile;        // [ROW_FRAGMENTS * 8, D]
  GradientTile dout_tile;  // [ROW_FRAGMENTS * 8, Dv]
  float lse_log2s[ROW_FRAGMENTS];
  float deltas[ROW_FRAGMENTS];
  float weight_factors[ROW_FRAGMENTS];  // NORMALISED

  // Params: of flash_bwd_bias or flash_bwd_captures.
  template <typename Params>
  METAL_FUNC void load(thread const FlashInputs& inputs, thread const BackwardBuffers& buffers,
                       constant Params& params, int batch, int head,
                       thread const Sequence& sequence, int lane_query, int column) thread {
    const int last_query = sequence.q_length - 1;
    q_tile.load(inputs.queries(batch, head, sequence, params.problem), lane_query, last_query,
                column);
    dout_tile.load(buffers.out_gradients(params.dout_strides, batch, head, sequence), lane_query,
                   last_query, column);
    const QueryStatistics statistics =
        buffers.statistics(params.lse_strides, batch, head, sequence);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const int query = existing_row(lane_query, i, last_query);
      lse_log2s[i] = statistics.lse_log2(query);
      deltas[i] = statistics.delta_of(query);
      if (NORMALISED) { weight_factors[i] = statistics.weight_factor(query); }
    }
  }

  // d loss / d score. weight_gradient: d loss / d weight.
  METAL_FUNC Fragment<float> differentiate(short i, Fragment<float> score,
                                           Fragment<float> weight_gradient) const thread {
    Fragment<float> weight = fast::exp2(score - lse_log2s[i]);
    if (NORMALISED) { weight *= weight_factors[i]; }
    return weight * (weight_gradient - deltas[i]);
  }
};
