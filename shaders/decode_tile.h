// flash_decode's tile: its sizes, its arrays, its rows of q, and the part that a lane has.
#pragma once

#include "blocks.h"
#include "flex.h"
#include "hadamard.h"
#include "output.h"
#include "params/decode.h"
#include "softmax.h"
#include "spans.h"

// The number of SIMD groups that have the same keys and different rows.
#ifndef ROW_SIMDGROUPS
#define ROW_SIMDGROUPS 1
#endif

// VECTOR_ROWS: the rows of q if values are multiplied without the matrix unit (decode_vector.h), or
// 0. KEY_LANES: the lanes that then share a row of v.
#ifndef VECTOR_ROWS
#define VECTOR_ROWS 0
#define KEY_LANES 1
#endif

constant constexpr int QK_SPANS = spans(HEAD_DIM_QK);
constant constexpr int V_SPANS = spans(HEAD_DIM_V);
// A SIMD group has every COLUMN_SIMDGROUPS-th span.
constant constexpr int OWN_QK_SPANS = (QK_SPANS + COLUMN_SIMDGROUPS - 1) / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_SPANS = (V_SPANS + COLUMN_SIMDGROUPS - 1) / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_FRAGMENTS = OWN_V_SPANS * SPAN_FRAGMENTS;
// A chain of products is one span if each span of codes has a scale.
constant constexpr int CHAIN_SPANS = K_SPAN_SCALES ? 1 : CHAIN_COLUMNS / SPAN_COLUMNS;
constant constexpr int ROWS = VECTOR_ROWS ? VECTOR_ROWS : ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_K = KEY_FRAGMENTS * FRAGMENT;
constant constexpr int STEP_K = KEY_SIMDGROUPS * BLOCK_K;
constant constexpr int SIMDGROUPS = KEY_SIMDGROUPS * COLUMN_SIMDGROUPS * ROW_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int SCORE_STRIDE = padded(BLOCK_K);
constant constexpr int SCORE_TILE = ROW_FRAGMENTS * FRAGMENT * SCORE_STRIDE;
// A tile of scores for each SIMD group, and a tile of sums for SIMD groups that share rows.
constant constexpr int SCORE_TILES = SIMDGROUPS + (COLUMN_SIMDGROUPS > 1 ? ROW_SIMDGROUPS : 0);
constant constexpr int SCORES = SCORE_TILES * SCORE_TILE;
// Columns of v, padded so that all lanes that share a row have equally many whole units.
constant constexpr int V_PADDED = (HEAD_DIM_V + UNIT_COLUMNS * KEY_LANES - 1) /
                                  (UNIT_COLUMNS * KEY_LANES) * (UNIT_COLUMNS * KEY_LANES);
constant constexpr int SIMDGROUP_WEIGHTS = VECTOR_ROWS ? (BLOCK_K + 1) * ROWS : 0;
constant constexpr int WEIGHTS = VECTOR_ROWS ? SIMDGROUPS * SIMDGROUP_WEIGHTS : 1;
constant constexpr int OUT_PAIRS =
    VECTOR_ROWS                         ? SIMDGROUPS * ROWS * V_PADDED / LANE_COLUMNS
    : KEY_SIMDGROUPS > 1                ? ROW_FRAGMENTS * OWN_V_FRAGMENTS * SIMD_LANES
    : HADAMARD && COLUMN_SIMDGROUPS > 1 ? ROW_SIMDGROUPS * V_SPANS * SIMD_LANES
                                        : 1;
constant constexpr int QUERY_PAIRS =
    KEY_SIMDGROUPS > 1 ? ROW_FRAGMENTS * OWN_QK_SPANS * SPAN_FRAGMENTS * SIMD_LANES : 1;
constant constexpr int STATES = KEY_SIMDGROUPS > 1 ? KEY_SIMDGROUPS * ROWS : 1;
// SIMD groups with different rows exchange a block's units. A span's scale follows its codes.
constant constexpr bool SPAN_SCALES = K_SPAN_SCALES || V_SPAN_SCALES;
constant constexpr int UNIT_PAIRS = (SPAN_FRAGMENTS + (SPAN_SCALES ? 1 : 0)) * SIMD_LANES;
constant constexpr int KEY_PAIRS = COLUMN_SIMDGROUPS * KEY_FRAGMENTS * OWN_QK_SPANS * UNIT_PAIRS;
constant constexpr int VALUE_PAIRS = COLUMN_SIMDGROUPS * KEY_FRAGMENTS * OWN_V_SPANS * UNIT_PAIRS;
constant constexpr int LOADED_PAIRS = ROW_SIMDGROUPS > 1 ? KEY_PAIRS + VALUE_PAIRS : 1;

static_assert(KEY_SIMDGROUPS == 1 || COLUMN_SIMDGROUPS == 1,
              "SIMD groups split either the keys or the columns");
static_assert(ROW_SIMDGROUPS == 1 || (COLUMN_SIMDGROUPS > 1 && !V_IN_K),
              "SIMD groups with different rows need split columns, and V that is not in K");
static_assert(ARRAY_BYTES(SCORES * sizeof(float)) + ARRAY_BYTES(WEIGHTS * sizeof(float)) +
                      ARRAY_BYTES(2 * OUT_PAIRS * sizeof(float)) +
                      ARRAY_BYTES(2 * STATES * sizeof(float)) +
                      ARRAY_BYTES(2 * QUERY_PAIRS * sizeof(ELEMENT)) +
                      ARRAY_BYTES(2 * LOADED_PAIRS * sizeof(KvTileElement)) +
                      (TREE ? ARRAY_BYTES(TREE_BYTES) : 0) <=
                  THREADGROUP_MEMORY_BYTES,
              "queries, scores, states, tokens and out fit in 32 KiB of threadgroup memory");

using Result = conditional_t<SPLIT, float, ELEMENT>;
using QueryTile = RegisterTile<ELEMENT, OWN_QK_SPANS * SPAN_FRAGMENTS, ROW_FRAGMENTS>;
using ProductTile = RegisterTile<float, KEY_FRAGMENTS, ROW_FRAGMENTS>;
using ScoreRow = RegisterTile<float, 1, KEY_FRAGMENTS>;
using OutTile = RegisterTile<float, ROW_FRAGMENTS, OWN_V_FRAGMENTS>;
using LoadedPair = Fragment<KvTileElement>;
using OutRow = Output<Result, HEAD_DIM_V, VECTOR_ROWS ? V_PADDED : V_SPANS * SPAN_COLUMNS>;

// The arrays in threadgroup memory. Arrays that a specialisation does not need have one element.
struct DecodeMemory {
  threadgroup float* scores;             // [SCORE_TILES, ROWS, BLOCK_K]
  threadgroup float* weights;            // [SIMDGROUPS, BLOCK_K + 1, ROWS] (VECTOR_ROWS)
  threadgroup Fragment<float>* out;      // [ROWS, Dv]
  threadgroup Fragment<ELEMENT>* q;      // [D, ROWS]
  threadgroup float2* states;            // [KEY_SIMDGROUPS, ROWS] of row_max and row_sum
  threadgroup LoadedPair* loaded_pairs;  // a block of k and v (ROW_SIMDGROUPS > 1)
};

// A lane's elements of fragments, and its SIMD group's keys, rows and spans.
struct DecodeLane {
  int index;  // in the SIMD group
  int simdgroup;
  int row;
  int column;
  int unit_column;
  int key_simdgroup;
  int row_simdgroup;
  int first_span;

  METAL_FUNC void reset(ushort simdgroup_index, ushort lane_index) thread {
    index = lane_index;
    simdgroup = simdgroup_index;
    row = fragment_row(index);
    column = fragment_column(index);
    unit_column = first_unit_column(column);
    key_simdgroup = ROW_SIMDGROUPS > 1 ? 0 : simdgroup / COLUMN_SIMDGROUPS;
    row_simdgroup = ROW_SIMDGROUPS > 1 ? simdgroup / COLUMN_SIMDGROUPS : 0;
    first_span = simdgroup % COLUMN_SIMDGROUPS;
  }

  // The SIMD group's s-th span. It may be after the row's last span (span_exists).
  METAL_FUNC int span(short s) const thread {
    return COLUMN_SIMDGROUPS == 1 ? s : first_span + s * COLUMN_SIMDGROUPS;
  }

  // True if the SIMD group loads fragment n of q. With HADAMARD it loads whole spans.
  METAL_FUNC bool loads_fragment(short n) const thread {
    return (HADAMARD ? n / SPAN_FRAGMENTS : n) % KEY_SIMDGROUPS == key_simdgroup;
  }

  // True for exactly one of the lanes that have the same row.
  METAL_FUNC bool stores_lse() const thread {
    return key_simdgroup == 0 && first_span == 0 && column == 0;
  }
};

// True if a row of `row_spans` spans has span number `span`.
METAL_FUNC bool span_exists(int span, int row_spans) {
  return row_spans % COLUMN_SIMDGROUPS == 0 || span < row_spans;
}

// The query and the head of a row of the tile.
struct TileRow {
  int query;
  int head;

  // Row `row` of the `rows` rows of a KV head. Row indices after the last row give the last row.
  METAL_FUNC void reset(int row, int rows, int kv_head, constant FlashParams& params) thread {
    const int heads = params.queries_per_kv;
    const int existing = min(row, rows - 1);
    query = existing / heads;
    head = kv_head * heads + existing % heads;
  }
};

// A lane's rows of the tile that begins at `first_row` of the `all_rows` rows of a KV head.
METAL_FUNC void reset_rows(thread TileRow* rows, int first_row, int lane_row, int all_rows,
                           int kv_head, constant FlashParams& problem) {
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    rows[i].reset(first_row + min(i * FRAGMENT + lane_row, ROWS - 1), all_rows, kv_head, problem);
  }
}
