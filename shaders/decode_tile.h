// What flash_decode works on: the sizes of its tile, the rows of q in it, and a block of keys.
#pragma once

#include "inputs.h"
#include "output.h"
#include "spans.h"

#ifndef V_IN_K
#define V_IN_K 0
#endif
#ifndef V_FIRST
#define V_FIRST 0
#endif
// The rows of q whose values are summed up without the matrix unit, and lanes that share a value's
// row then (decode_vector.h). 0: all rows, with it.
#ifndef VECTOR_ROWS
#define VECTOR_ROWS 0
#define KEY_LANES 1
#endif

constant constexpr int QK_SPANS = spans(HEAD_DIM_QK);
constant constexpr int V_SPANS = spans(HEAD_DIM_V);
// A SIMD group's share of them: every COLUMN_SIMDGROUPS-th.
constant constexpr int OWN_QK_SPANS = (QK_SPANS + COLUMN_SIMDGROUPS - 1) / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_SPANS = (V_SPANS + COLUMN_SIMDGROUPS - 1) / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_FRAGMENTS = OWN_V_SPANS * SPAN_FRAGMENTS;
// Each span of codes has a scale of its own.
#if KV_BLOCK_SCALES
constant constexpr int CHAIN_SPANS = 1;
#else
constant constexpr int CHAIN_SPANS = CHAIN_COLUMNS / SPAN_COLUMNS;
#endif
constant constexpr int ROWS = VECTOR_ROWS ? VECTOR_ROWS : ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_K = KEY_FRAGMENTS * FRAGMENT;
constant constexpr int STEP_K = KEY_SIMDGROUPS * BLOCK_K;
constant constexpr int SIMDGROUPS = KEY_SIMDGROUPS * COLUMN_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int SCORE_STRIDE = padded(BLOCK_K);
constant constexpr int SCORE_TILE = ROW_FRAGMENTS * FRAGMENT * SCORE_STRIDE;
// One tile of scores a SIMD group, and one of their sums.
constant constexpr int SCORE_TILES = SIMDGROUPS + (COLUMN_SIMDGROUPS > 1 ? 1 : 0);
constant constexpr int SCORES = SCORE_TILES * SCORE_TILE;
// Columns of the units of all lanes that share a value's row.
constant constexpr int V_PADDED = (HEAD_DIM_V + UNIT_COLUMNS * KEY_LANES - 1) /
                                  (UNIT_COLUMNS * KEY_LANES) * (UNIT_COLUMNS * KEY_LANES);
constant constexpr int SIMDGROUP_WEIGHTS = VECTOR_ROWS ? (BLOCK_K + 1) * ROWS : 0;
constant constexpr int WEIGHTS = VECTOR_ROWS ? SIMDGROUPS * SIMDGROUP_WEIGHTS : 1;
constant constexpr int OUT_PAIRS = VECTOR_ROWS ? SIMDGROUPS * ROWS * V_PADDED / LANE_COLUMNS
                                   : KEY_SIMDGROUPS > 1
                                       ? ROW_FRAGMENTS * OWN_V_FRAGMENTS * SIMD_LANES
                                       : 1;
constant constexpr int QUERY_PAIRS =
    KEY_SIMDGROUPS > 1 ? ROW_FRAGMENTS * OWN_QK_SPANS * SPAN_FRAGMENTS * SIMD_LANES : 1;
constant constexpr int STATES = KEY_SIMDGROUPS > 1 ? KEY_SIMDGROUPS * ROWS : 1;

static_assert(KEY_SIMDGROUPS == 1 || COLUMN_SIMDGROUPS == 1,
              "SIMD groups split either the keys or the columns");
static_assert((SCORES + WEIGHTS + 2 * OUT_PAIRS + 2 * STATES) * sizeof(float) +
                      2 * QUERY_PAIRS * sizeof(ELEMENT) <=
                  THREADGROUP_MEMORY_BYTES,
              "queries, scores, states and out fit in 32 KiB of threadgroup memory");

#if SPLIT
using Result = float;
#else
using Result = ELEMENT;
#endif
using QueryTile = RegisterTile<ELEMENT, OWN_QK_SPANS * SPAN_FRAGMENTS, ROW_FRAGMENTS>;
using ProductTile = RegisterTile<float, KEY_FRAGMENTS, ROW_FRAGMENTS>;
using ScoreRow = RegisterTile<float, 1, KEY_FRAGMENTS>;
using OutTile = RegisterTile<float, ROW_FRAGMENTS, OWN_V_FRAGMENTS>;
using OutRow = Output<Result, HEAD_DIM_V, VECTOR_ROWS ? V_PADDED : V_SPANS * SPAN_COLUMNS>;

// Which query of which head a row of the tile is.
struct TileRow {
  int query;
  int head;

  // Rows past the last repeat it.
  METAL_FUNC void reset(int row, int kv_head, constant FlashParams& params) thread {
    const int heads = params.queries_per_kv;
    const int existing = min(row, params.q_length * heads - 1);
    query = existing / heads;
    head = kv_head * heads + existing % heads;
  }
};

// The SIMD group's part of the products of one block of keys.
struct BlockKeys {
  // The lane's rows of k and v: past the last they repeat it.
  typename Keys::Place k_places[KEY_FRAGMENTS];
  typename Values::Place v_places[KEY_FRAGMENTS];
  bool exist[KEY_FRAGMENTS];
  Unit<KvTileElement> v_units[KEY_FRAGMENTS][OWN_V_SPANS];
#if KV_BLOCK_SCALES
  uint2 v_codes[KEY_FRAGMENTS][OWN_V_SPANS];
  float v_scales[KEY_FRAGMENTS][OWN_V_SPANS];
#endif

  METAL_FUNC void reset(thread const Keys& keys, thread const Values& values, int first_row,
                        thread const Sequence& sequence) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const int row = first_row + j * FRAGMENT;
      k_places[j] = keys.find(min(row, sequence.kv_length - 1));
      v_places[j] = values.find(min(row, sequence.kv_length - 1));
      exist[j] = row >= sequence.first_key && row < sequence.kv_length;
    }
  }

  // What is still to be read for the values of span `span`, the SIMD group's s-th. Rows that do not
  // exist are zero: their weight is zero, and zero times whatever lies there must stay zero.
  METAL_FUNC void load_values(short s, int span, thread const Values& values,
                              int unit_column) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
#if KV_BLOCK_SCALES
      const float scale = values.span_scale(v_places[j], span);
      v_scales[j][s] = exist[j] ? scale : 0.0f;
#if !V_IN_K
      v_codes[j][s] = values.codes(v_places[j], span * SPAN_COLUMNS + unit_column);
#endif
#elif !V_IN_K
      v_units[j][s].load<HEAD_DIM_V>(values, v_places[j], span * SPAN_COLUMNS + unit_column,
                                     exist[j]);
#endif
    }
  }

#if KV_BLOCK_SCALES
  // Makes ELEMENT of the codes of the s-th span, and scales the weights that they meet: a lane has
  // the scales of its own row, and needs those of the keys of its two columns.
  METAL_FUNC void scale_span(thread ScoreRow* span_weights, short s, ushort column) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
#if !V_IN_K
      v_units[j][s].expand_codes(v_codes[j][s]);
#endif
      const Fragment<float> scales =
          Fragment<float>(simd_shuffle(v_scales[j][s], row_lane(column)),
                          simd_shuffle(v_scales[j][s], row_lane(column + 1)));
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        span_weights[i].fragments[0][j] *= scales;
      }
    }
  }
#endif

  // products = k q^T of the SIMD group's columns.
  METAL_FUNC void multiply(thread ProductTile& products, thread const QueryTile& q_tile,
                           thread const Keys& keys, int first_span, int unit_column) thread {
    products.fill(0.0f);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short first = 0; first < OWN_QK_SPANS; first += CHAIN_SPANS) {
        RegisterTile<float, 1, ROW_FRAGMENTS> chain;
        chain.fill(0.0f);
        UNROLL
        for (short s = first; s < min(OWN_QK_SPANS, first + CHAIN_SPANS); s++) {
          const int span = first_span + s * COLUMN_SIMDGROUPS;
          if (QK_SPANS % COLUMN_SIMDGROUPS == 0 || span < QK_SPANS) {
            Unit<KvTileElement> unit;
#if KV_BLOCK_SCALES
            unit.expand_codes(keys.codes(k_places[j], span * SPAN_COLUMNS + unit_column));
#else
            unit.load<HEAD_DIM_QK>(keys, k_places[j], span * SPAN_COLUMNS + unit_column,
                                   !V_IN_K || exist[j]);
#endif
#if V_IN_K
            if (s < OWN_V_SPANS) {
              v_units[j][s] = unit;
            }
#endif
            UNROLL
            for (short f = 0; f < SPAN_FRAGMENTS; f++) {
              // Shipped kernels multiply float by half or bfloat with the float on the left only.
              const Fragment<ELEMENT> key_fragment =
                  Fragment<ELEMENT>(ELEMENT(unit.fragments[f].x), ELEMENT(unit.fragments[f].y));
              UNROLL
              for (short i = 0; i < ROW_FRAGMENTS; i++) {
                mma<ELEMENT, ELEMENT>(chain.fragments[0][i], key_fragment,
                                      q_tile.fragments[s * SPAN_FRAGMENTS + f][i]);
              }
            }
          }
        }
#if KV_BLOCK_SCALES
        const int chain_span = min(first_span + first * COLUMN_SIMDGROUPS, QK_SPANS - 1);
        chain.scale(keys.span_scale(k_places[j], chain_span));
#endif
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          products.fragments[j][i] += chain.fragments[0][i];
        }
      }
    }
  }

  // o = o * corrections + weights v of the SIMD group's columns.
  METAL_FUNC void accumulate(thread OutTile& o, thread const float* corrections,
                             thread const ScoreRow* weights, thread const Values& values,
                             int first_span, int unit_column, ushort column) thread {
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      const int span = first_span + s * COLUMN_SIMDGROUPS;
      if (V_SPANS % COLUMN_SIMDGROUPS == 0 || span < V_SPANS) {
#if !V_FIRST
        load_values(s, span, values, unit_column);
#endif
        ScoreRow span_weights[ROW_FRAGMENTS];
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          span_weights[i] = weights[i];
        }
#if KV_BLOCK_SCALES
        scale_span(span_weights, s, column);
#endif
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          UNROLL
          for (short i = 0; i < ROW_FRAGMENTS; i++) {
            Fragment<float> block = Fragment<float>(0.0f, 0.0f);
            UNROLL
            for (short j = 0; j < KEY_FRAGMENTS; j++) {
              mma<float, KvTileElement>(block, span_weights[i].fragments[0][j],
                                        v_units[j][s].fragments[f]);
            }
            thread Fragment<float>& sum = o.fragments[i][s * SPAN_FRAGMENTS + f];
            sum = sum * corrections[i] + block;
          }
        }
      }
    }
  }
};
