// The product of weights and values on the matrix unit.
#pragma once

#include "decode_hadamard.h"
#include "decode_products.h"

// The SIMD group's columns of out, [ROWS, Dv].
struct MatrixOut {
  OutTile tile;
  DecodeLane lane;
  threadgroup Fragment<float>* sums;  // of SIMD groups with different keys

  METAL_FUNC void reset(thread const DecodeMemory& memory,
                        thread const DecodeLane& decode_lane) thread {
    lane = decode_lane;
    sums = memory.out;
    tile.fill(0.0f);
  }

  // out = out * corrections + weights v
  METAL_FUNC void accumulate(thread BlockKeys& block, thread const DecodeKv& kv,
                             thread const ScoreRow* weights,
                             thread const float* corrections) thread {
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      if (!span_exists(lane.span(s), V_SPANS)) { continue; }
      block.load_values(s, kv);
      ScoreRow span_weights[ROW_FRAGMENTS];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) { span_weights[i] = weights[i]; }
      if (V_SPAN_SCALES) { block.scale_span(span_weights, s, lane.index); }
      UNROLL
      for (short f = 0; f < SPAN_FRAGMENTS; f++) {
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          Fragment<float> products = Fragment<float>(0.0f, 0.0f);
          UNROLL
          for (short j = 0; j < KEY_FRAGMENTS; j++) {
            mma<float, KvTileElement>(products, span_weights[i].fragments[0][j],
                                      block.v_units[j][s].fragments[f]);
          }
          thread Fragment<float>& sum = tile.fragments[i][s * SPAN_FRAGMENTS + f];
          sum = sum * corrections[i] + products;
        }
      }
    }
  }

  // Multiplies the lane's row i by `share`, or sets it to 0 if it sees no key.
  METAL_FUNC void scale_row(short i, float share, bool sees_nothing) thread {
    UNROLL
    for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
      tile.fragments[i][d] =
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : tile.fragments[i][d] * share;
    }
  }

  // Adds up the results of SIMD groups with different keys, and stores the rows.
  METAL_FUNC void write(thread const TileResult& result,
                        constant FlashDecodeParams& params) thread {
    sum_over_keys();
    if (lane.key_simdgroup != 0) { return; }
    if (HADAMARD) {
      UNROLL
      for (short i = 0; KEY_SIMDGROUPS > 1 && i < ROW_FRAGMENTS; i++) { add_sums(i); }
      multiply_by_hadamard(tile, sums, lane);
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (!result.has_row(i * FRAGMENT + lane.row)) { continue; }
      OutRow out_row;
      result.split.place(out_row, result.rows[i].head, params);
      UNROLL
      for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
        const int span = lane.span(d / SPAN_FRAGMENTS);
        if (span_exists(span, V_SPANS)) {
          if (KEY_SIMDGROUPS > 1 && !HADAMARD) { tile.fragments[i][d] += sums[sum_place(i, d)]; }
          out_row.store(result.rows[i].query,
                        span * SPAN_COLUMNS + lane.unit_column + d % SPAN_FRAGMENTS * LANE_COLUMNS,
                        tile.fragments[i][d]);
        }
      }
    }
  }

  // From the last SIMD group to the second, each adds the stored sums to its own and stores these.
  METAL_FUNC void sum_over_keys() thread {
    UNROLL
    for (short current = KEY_SIMDGROUPS - 1; current > 0; current--) {
      if (lane.simdgroup == current) {
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          if (current < KEY_SIMDGROUPS - 1) { add_sums(i); }
          UNROLL
          for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
            sums[sum_place(i, d)] = tile.fragments[i][d];
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the next SIMD group reads the sums
    }
  }

  METAL_FUNC void add_sums(short i) thread {
    UNROLL
    for (short d = 0; d < OWN_V_FRAGMENTS; d++) { tile.fragments[i][d] += sums[sum_place(i, d)]; }
  }

  METAL_FUNC int sum_place(short i, short d) const thread {
    return (i * OWN_V_FRAGMENTS + d) * SIMD_LANES + lane.index;
  }
};
