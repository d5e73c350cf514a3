// What flash_decode works on: the sizes of its tile, the rows of q in it, and where a lane works.
#pragma once

#include "blocks.h"
#include "flex.h"
#include "hadamard.h"
#include "output.h"
#include "params/decode.h"
#include "softmax.h"
#include "spans.h"

// SIMD groups with the same keys and other rows.
#ifndef ROW_SIMDGROUPS
#define ROW_SIMDGROUPS 1
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
constant constexpr int CHAIN_SPANS = K_SPAN_SCALES ? 1 : CHAIN_COLUMNS / SPAN_COLUMNS;
constant constexpr int ROWS = VECTOR_ROWS ? VECTOR_ROWS : ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_K = KEY_FRAGMENTS * FRAGMENT;
constant constexpr int STEP_K = KEY_SIMDGROUPS * BLOCK_K;
constant constexpr int SIMDGROUPS = KEY_SIMDGROUPS * COLUMN_SIMDGROUPS * ROW_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int SCORE_STRIDE = padded(BLOCK_K);
constant constexpr int SCORE_TILE = ROW_FRAGMENTS * FRAGMENT * SCORE_STRIDE;
// One tile of scores a SIMD group, and one of their sums for those that share rows.
constant constexpr int SCORE_TILES = SIMDGROUPS + (COLUMN_SIMDGROUPS > 1 ? ROW_SIMDGROUPS : 0);
constant constexpr int SCORES = SCORE_TILES * SCORE_TILE;
// Columns of the units of all lanes that share a value's row.
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
// Pairs of a block's keys and values that SIMD groups with other rows have loaded. A unit of codes
// is followed by the scale of its span.
constant constexpr bool SPAN_SCALES = K_SPAN_SCALES || V_SPAN_SCALES;
constant constexpr int UNIT_PAIRS = (SPAN_FRAGMENTS + (SPAN_SCALES ? 1 : 0)) * SIMD_LANES;
constant constexpr int KEY_PAIRS = COLUMN_SIMDGROUPS * KEY_FRAGMENTS * OWN_QK_SPANS * UNIT_PAIRS;
constant constexpr int VALUE_PAIRS = COLUMN_SIMDGROUPS * KEY_FRAGMENTS * OWN_V_SPANS * UNIT_PAIRS;
constant constexpr int LOADED_PAIRS = ROW_SIMDGROUPS > 1 ? KEY_PAIRS + VALUE_PAIRS : 1;

static_assert(KEY_SIMDGROUPS == 1 || COLUMN_SIMDGROUPS == 1,
              "SIMD groups split either the keys or the columns");
static_assert(ROW_SIMDGROUPS == 1 || (COLUMN_SIMDGROUPS > 1 && !V_IN_K),
              "SIMD groups with other rows share columns, and V apart from K");
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
using OutRow = Output<Result, HEAD_DIM_V, VECTOR_ROWS ? V_PADDED : V_SPANS * SPAN_COLUMNS>;

// Where a lane works: in which fragments' elements, and in which SIMD group's keys, rows or spans.
struct DecodeLane {
  int lane;
  int simdgroup;
  int row;
  int column;
  int unit_column;
  int key_simdgroup;
  int row_simdgroup;
  int first_span;

  METAL_FUNC void reset(ushort own_simdgroup, ushort own_lane) thread {
    lane = own_lane;
    simdgroup = own_simdgroup;
    row = fragment_row(lane);
    column = fragment_column(lane);
    unit_column = first_unit_column(column);
    key_simdgroup = ROW_SIMDGROUPS > 1 ? 0 : simdgroup / COLUMN_SIMDGROUPS;
    row_simdgroup = ROW_SIMDGROUPS > 1 ? simdgroup / COLUMN_SIMDGROUPS : 0;
    first_span = simdgroup % COLUMN_SIMDGROUPS;
  }

  // The SIMD group's s-th span of those of a row, which may be behind the last.
  METAL_FUNC int span(short s) const thread {
    return COLUMN_SIMDGROUPS == 1 ? s : first_span + s * COLUMN_SIMDGROUPS;
  }
};

// Whether one of the SIMD groups' spans exists, of so many in a row.
METAL_FUNC bool span_exists(int span, int row_spans) {
  return row_spans % COLUMN_SIMDGROUPS == 0 || span < row_spans;
}

// Blocks of keys that a threadgroup walks along: one list for all of its rows.
using DecodeBlocks = Blocks<listed_rows(FRAGMENT, FLEX_KV_BLOCK)>;

// A row of k and v in place of one that does not exist.
METAL_FUNC int readable_row(int row, thread const Sequence& sequence) {
  return min(INDICES ? max(row, 0) : row, sequence.kv_length - 1);
}

// The rows of q that are dealt out to a threadgroup: a tile from `begin` on, and every `step` rows.
struct RowShare {
  int begin;
  int step;
  int end;  // of all rows, or of those that have its list of keys
  int list;

  METAL_FUNC void reset(int row_group, int rows, constant FlashDecodeParams& params) thread {
    list = INDICES ? row_group / params.list_groups : 0;
    const int first = INDICES ? list * params.list_rows : 0;
    const int list_group = INDICES ? row_group % params.list_groups : row_group;
    begin = first + list_group * ROWS * ROW_SIMDGROUPS;
    step = (INDICES ? params.list_groups : params.row_groups) * ROWS * ROW_SIMDGROUPS;
    end = INDICES ? min(first + params.list_rows, rows) : rows;
  }
};

// Which query of which head a row of the tile is.
struct TileRow {
  int query;
  int head;

  // One of so many rows of a KV head; those past the last repeat it.
  METAL_FUNC void reset(int row, int rows, int kv_head, constant FlashParams& params) thread {
    const int heads = params.queries_per_kv;
    const int existing = min(row, rows - 1);
    query = existing / heads;
    head = kv_head * heads + existing % heads;
  }
};

// Where the results of one split go.
struct SplitResult {
  device Result* out;
  device float* lse;
  int batch;
  int first;  // the sequence's first row (PACKED_Q)

  METAL_FUNC void reset(device Result* all, device float* all_lse, int split, int own_batch,
                        int first_row, constant FlashDecodeParams& params) thread {
    out = all + split * params.out_split_stride;
    lse = all_lse + own_batch * params.lse_strides.batch + first_row * params.lse_strides.row +
          split * params.lse_split_stride;
    batch = own_batch;
    first = first_row;
  }

  METAL_FUNC void place(thread OutRow& row, int head,
                        constant FlashDecodeParams& params) const thread {
    row.reset(out, params.out_strides, batch, head, first, 0);
  }

  METAL_FUNC void store_lse(thread const TileRow& own, float value,
                            constant FlashDecodeParams& params) const thread {
    lse[own.head * params.lse_strides.head + own.query * params.lse_strides.row] = value;
  }
};

// A split's share of the steps over keys that any query sees. The last split has all steps with new
// keys, and it alone writes them.
METAL_FUNC Range keys_of_split(Range keys, int old_length, int split, int splits) {
  const int shared_steps = APPEND ? max(old_length - keys.begin, 0) / STEP_K
                                  : (max(keys.end - keys.begin, 0) + STEP_K - 1) / STEP_K;
  const int split_steps = (shared_steps + splits - 1) / splits;
  const int shared_end = keys.begin + min((split + 1) * split_steps, shared_steps) * STEP_K;
  Range own;
  own.begin = keys.begin + min(split * split_steps, shared_steps) * STEP_K;
  own.end = split == splits - 1 ? keys.end : min(keys.end, shared_end);
  return own;
}
