// Hadamard transforms of flash_decode: of q when it is loaded, and of finished rows of out.
#pragma once

#include "decode_tile.h"

// Loads span `span` of a row of q, multiplied by the Hadamard matrix: the lane's elements of the
// transposed span. All lanes call it, each with its own row.
METAL_FUNC void load_hadamard_span(thread float* values, thread const Queries& queries, int query,
                                   int span, thread const DecodeLane& lane) {
  const int first_span = span / max(HADAMARD_SPANS, 1) * HADAMARD_SPANS;
  UNROLL
  for (short f = 0; f < SPAN_FRAGMENTS; f++) {
    values[f] = 0.0f;
    UNROLL
    for (short n = 0; n < HADAMARD_SPANS; n++) {
      const int column = (first_span + n) * SPAN_COLUMNS + span_column(lane.row, f);
      const float value = column < HEAD_DIM_QK ? float(queries.element(query, column)) : 0.0f;
      values[f] += value * hadamard_sign(n, span - first_span);
    }
  }
  hadamard_values<SPAN_FRAGMENTS>(values);
  UNROLL
  for (ushort bit = 1; bit < FRAGMENT; bit *= 2) {
    hadamard_lanes<SPAN_FRAGMENTS>(values, lane.index, row_lane(bit));
  }
}

// Loads element e of row fragment i of q, multiplied by the Hadamard matrix.
METAL_FUNC void load_hadamard(thread QueryTile& q_tile, short i, short e,
                              thread const Queries& queries, int query,
                              thread const DecodeLane& lane) {
  UNROLL
  for (short s = 0; s < OWN_QK_SPANS; s++) {
    if (lane.loads_fragment(s * SPAN_FRAGMENTS)) {
      float values[SPAN_FRAGMENTS];
      load_hadamard_span(values, queries, query, lane.span(s), lane);
      UNROLL
      for (short f = 0; f < SPAN_FRAGMENTS; f++) {
        q_tile.fragments[s * SPAN_FRAGMENTS + f][i][e] = ELEMENT(values[f] * HADAMARD_SCALE);
      }
    }
  }
}

// The transform over the spans of a block, for one fragment of each span.
METAL_FUNC void join_spans(thread Fragment<float>* pairs, threadgroup Fragment<float>* memory,
                           thread const DecodeLane& lane) {
  Fragment<float> spans[COLUMN_SIMDGROUPS == 1 ? OWN_V_SPANS : 1];
  threadgroup Fragment<float>* rows = memory + lane.row_simdgroup * V_SPANS * SIMD_LANES;
  UNROLL
  for (short s = 0; s < OWN_V_SPANS; s++) {
    if (COLUMN_SIMDGROUPS == 1) {
      spans[COLUMN_SIMDGROUPS == 1 ? s : 0] = pairs[s * SPAN_FRAGMENTS];
    } else if (span_exists(lane.span(s), V_SPANS)) {
      rows[lane.span(s) * SIMD_LANES + lane.index] = pairs[s * SPAN_FRAGMENTS];
    }
  }
  if (COLUMN_SIMDGROUPS > 1) { threadgroup_barrier(mem_flags::mem_threadgroup); }
  UNROLL
  for (short s = 0; s < OWN_V_SPANS; s++) {
    const int span = lane.span(s);
    const int first = span / max(HADAMARD_SPANS, 1) * HADAMARD_SPANS;
    Fragment<float> sum = Fragment<float>(0.0f, 0.0f);
    UNROLL
    for (short n = 0; n < HADAMARD_SPANS && span_exists(span, V_SPANS); n++) {
      const Fragment<float> pair =
          COLUMN_SIMDGROUPS == 1 ? spans[first + n] : rows[(first + n) * SIMD_LANES + lane.index];
      sum += pair * hadamard_sign(n, span - first);
    }
    pairs[s * SPAN_FRAGMENTS] = sum;
  }
  if (COLUMN_SIMDGROUPS > 1) { threadgroup_barrier(mem_flags::mem_threadgroup); }
}

// Multiplies the SIMD group's columns of out by the Hadamard matrix. memory: for exchanged spans.
METAL_FUNC void multiply_by_hadamard(thread OutTile& out, threadgroup Fragment<float>* memory,
                                     thread const DecodeLane& lane) {
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      thread Fragment<float>* span = out.fragments[i] + s * SPAN_FRAGMENTS;
      float values[UNIT_COLUMNS];
      UNROLL
      for (short f = 0; f < SPAN_FRAGMENTS; f++) {
        values[2 * f] = span[f].x;
        values[2 * f + 1] = span[f].y;
      }
      hadamard_values<UNIT_COLUMNS>(values);
      // The lanes of a span's other units differ in bits 2 and 4 of the fragment's column.
      hadamard_lanes<UNIT_COLUMNS>(values, lane.index, column_lane(2));
      hadamard_lanes<UNIT_COLUMNS>(values, lane.index, column_lane(4));
      UNROLL
      for (short f = 0; f < SPAN_FRAGMENTS; f++) {
        span[f] = Fragment<float>(values[2 * f], values[2 * f + 1]) * HADAMARD_SCALE;
      }
    }
    UNROLL
    for (short f = 0; HADAMARD_SPANS > 1 && f < SPAN_FRAGMENTS; f++) {
      join_spans(out.fragments[i] + f, memory, lane);
    }
  }
}
