// flash_decode's rows of q: how they are loaded, and how their products become weights.
#pragma once

#include "decode_hadamard.h"
#include "decode_products.h"

// scores = products^T, through the SIMD group's tile in threadgroup memory. If the columns are
// split between SIMD groups, their products are also added up.
METAL_FUNC void transpose_scores(thread ScoreRow* scores, thread const ProductTile& products,
                                 threadgroup float* tiles, thread const DecodeLane& lane) {
  threadgroup float* tile = tiles + lane.simdgroup * SCORE_TILE;
  if (COLUMN_SIMDGROUPS == 1) { simdgroup_barrier(mem_flags::mem_threadgroup); }
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      threadgroup float* place =
          tile + (i * FRAGMENT + lane.column) * SCORE_STRIDE + j * FRAGMENT + lane.row;
      place[0] = products.fragments[j][i].x;
      place[SCORE_STRIDE] = products.fragments[j][i].y;
    }
  }
  if (COLUMN_SIMDGROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    // `first` is the first of the SIMD groups that share rows.
    const int group = lane.row_simdgroup;
    const int first = group * COLUMN_SIMDGROUPS;
    threadgroup float* sums = tiles + (SIMDGROUPS + group) * SCORE_TILE;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = (lane.simdgroup - first) * SIMD_LANES + lane.index; n < ROWS * BLOCK_K;
         n += COLUMN_SIMDGROUPS * SIMD_LANES) {
      const int place = n / BLOCK_K * SCORE_STRIDE + n % BLOCK_K;
      float sum = 0.0f;
      UNROLL
      for (short part = 0; part < COLUMN_SIMDGROUPS; part++) {
        sum += tiles[(first + part) * SCORE_TILE + place];
      }
      sums[place] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile = sums;
  }
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      scores[i].fragments[0][j] = *reinterpret_cast<threadgroup Fragment<float>*>(
          tile + (i * FRAGMENT + lane.row) * SCORE_STRIDE + j * FRAGMENT + lane.column);
    }
  }
}

// SIMD groups with different keys exchange the fragments of q that they have loaded.
METAL_FUNC void exchange_query_fragments(thread QueryTile& q_tile,
                                         threadgroup Fragment<ELEMENT>* pairs,
                                         thread const DecodeLane& lane) {
  if (KEY_SIMDGROUPS == 1) { return; }
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (lane.loads_fragment(n)) {
        pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane.index] = q_tile.fragments[n][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      q_tile.fragments[n][i] = pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane.index];
    }
  }
}

// A tile of rows of q, whose scores arrive block by block.
struct DecodeRows {
  TileRow rows[ROW_FRAGMENTS];  // the lane's
  Rules<1, false> rules[ROW_FRAGMENTS];
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  Range seen_by_first;  // the keys that the tile's first row sees
  Range seen_by_last;   // the keys that the tile's last row sees

  METAL_FUNC void reset(thread const FlashInputs& inputs, thread const DecodeTask& task,
                        int first_row, thread const DecodeLane& lane,
                        constant FlashParams& problem) thread {
    reset_rows(rows, first_row, lane.row, task.rows, task.kv_head, problem);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      softmax[i].reset();
      rules[i].reset(inputs, task.batch, rows[i].head, rows[i].query, lane.column, task.visible,
                     task.sequence, problem);
    }
    const int last_row = min(first_row + ROWS, task.rows) - 1;
    seen_by_first = task.visible.keys_of(first_row / problem.queries_per_kv);
    seen_by_last = task.visible.keys_of(last_row / problem.queries_per_kv);
    if (TREE) {  // bounds that hold for every path
      seen_by_last = task.visible.keys_of(task.tree.count - 1);
      seen_by_first.end = task.visible.existing.end - task.tree.count;
    }
  }

  // Masks out the keys of a block that row i does not see.
  METAL_FUNC void hide_unseen(thread ScoreRow& scores, short i, thread const BlockKeys& block,
                              thread const DecodeTask& task,
                              thread const DecodeLane& lane) const thread {
    const bool hides =
        block.first < seen_by_last.begin || block.first + BLOCK_K > seen_by_first.end;
    const int query = rows[i].query;
    const int column = block.first + lane.column;
    if (INDICES) {
      hide_listed(scores, block, lane.index, task.visible.keys_of(query));
    } else if (TREE && hides) {
      hide_tokens(scores, task.tree.token(query), column,
                  task.visible.existing.end - task.tree.count);
    } else if (hides) {
      task.visible.apply<false>(scores, query, column);
    }
  }

  // Masks out keys from `column` on that a new token does not see. first_new: the key of token 0.
  METAL_FUNC static void hide_tokens(thread ScoreRow& scores, TreeToken token, int column,
                                     int first_new) {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short e = 0; e < LANE_COLUMNS; e++) {
        const int key = column + column_offset(j) + e;
        const bool shown = key < first_new ? key >= token.begin : token.seen.has(key - first_new);
        scores.fragments[0][j][e] = shown ? scores.fragments[0][j][e] : -INFINITY;
      }
    }
  }

  // Masks out listed keys that a query does not see. Keys that do not exist have the score NaN.
  METAL_FUNC static void hide_listed(thread ScoreRow& scores, thread const BlockKeys& block,
                                     ushort lane_index, Range seen) {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const vec<int, 2> keys = block.column_rows(j, lane_index);
      UNROLL
      for (short e = 0; e < LANE_COLUMNS; e++) {
        const float hidden = keys[e] == IMPOSSIBLE_ROW ? NAN : -INFINITY;
        const bool shown = keys[e] >= seen.begin && keys[e] < seen.end;
        scores.fragments[0][j][e] = shown ? scores.fragments[0][j][e] : hidden;
      }
    }
  }

  // Stores the states of the rows, which SIMD groups with other keys read.
  METAL_FUNC void store_states(threadgroup float2* states, thread const float* row_sums,
                               thread const DecodeLane& lane) const thread {
    if (KEY_SIMDGROUPS == 1) { return; }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (lane.column == 0 && i * FRAGMENT + lane.row < ROWS) {
        states[lane.simdgroup * ROWS + i * FRAGMENT + lane.row] =
            float2(softmax[i].row_max, row_sums[i]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};

// A row's maximum and sum over all keys.
struct RowTotal {
  OnlineSoftmax softmax;
  float sum;

  // Merges the state of a lane's row with the states that SIMD groups with other keys have stored.
  METAL_FUNC void join(thread const OnlineSoftmax& state, float state_sum,
                       const threadgroup float2* states, int tile_row) thread {
    softmax = state;
    sum = state_sum;
    if (KEY_SIMDGROUPS == 1) { return; }
    const threadgroup float2* row_states = states + min(tile_row, ROWS - 1);
    UNROLL
    for (short n = 0; n < KEY_SIMDGROUPS; n++) {
      softmax.row_max = max(softmax.row_max, row_states[n * ROWS].x);
    }
    sum = 0.0f;
    UNROLL
    for (short n = 0; n < KEY_SIMDGROUPS; n++) {
      const float2 state = row_states[n * ROWS];
      sum += state.y * fast::exp2(state.x - softmax.row_max);
    }
  }

  // With SPLIT, merge_splits adds the sink, once.
  METAL_FUNC void add_sink(thread const FlashInputs& inputs, int head) thread {
    if (!SINK || SPLIT) { return; }
    const float keys_max = softmax.row_max;
    softmax.row_max = max(keys_max, inputs.sink_log2(head));
    sum = sum * fast::exp2(keys_max - softmax.row_max) + inputs.sink_weight(head, softmax.row_max);
  }

  METAL_FUNC float logsumexp() const thread { return softmax.logsumexp(sum); }
};

// The queries of a tile row's head. New queries are rotated by their tokens' rows of cos and sin.
METAL_FUNC Queries queries_of(TileRow row, thread const FlashInputs& inputs,
                              thread const DecodeTask& task, constant FlashDecodeParams& params) {
  Queries queries = inputs.queries(task.batch, row.head, task.sequence, params.problem);
  if (APPEND && Q_ROTARY) {
    queries.rotary.start_at(task.first_rotary, params.rotate_q_by_token != 0);
    if (TREE && params.rotate_q_by_token != 0) {
      // The rotation adds the query's index to the row. Here the depth replaces the index.
      const int depth = max(task.tree.depth_of(row.query), 0);
      queries.rotary.start_at(depth - row.query, true);
    }
  }
  return queries;
}

// Loads q transposed, [D, ROWS]. Each SIMD group with the same columns loads and rotates a part.
METAL_FUNC void load_queries(thread QueryTile& q_tile, threadgroup Fragment<ELEMENT>* pairs,
                             thread const FlashInputs& inputs, thread const DecodeTask& task,
                             int first_row, thread const DecodeLane& lane,
                             constant FlashDecodeParams& params) {
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short e = 0; e < LANE_COLUMNS; e++) {
      TileRow row;
      row.reset(first_row + i * FRAGMENT + lane.column + e, task.rows, task.kv_head,
                params.problem);
      const Queries queries = queries_of(row, inputs, task, params);
      if (HADAMARD) {
        load_hadamard(q_tile, i, e, queries, row.query, lane);
        continue;
      }
      UNROLL
      for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
        const int d = lane.span(n / SPAN_FRAGMENTS) * SPAN_COLUMNS +
                      span_column(lane.row, n % SPAN_FRAGMENTS);
        if (lane.loads_fragment(n)) {
          q_tile.fragments[n][i][e] = d < HEAD_DIM_QK ? queries.element(row.query, d) : ELEMENT(0);
        }
      }
    }
  }
  exchange_query_fragments(q_tile, pairs, lane);
}
