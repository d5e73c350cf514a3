// The rows of q of flash_decode's tile: how they are loaded, and how products become their weights.
#pragma once

#include "decode_products.h"

// scores = products^T, through the SIMD group's tile in threadgroup memory; where SIMD groups split
// the columns, summed over them.
METAL_FUNC void transpose_scores(thread ScoreRow* scores, thread const ProductTile& products,
                                 threadgroup float* tiles, ushort simdgroup, ushort lane) {
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  threadgroup float* tile = tiles + simdgroup * SCORE_TILE;
  if (COLUMN_SIMDGROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      threadgroup float* place = tile + (i * FRAGMENT + column) * SCORE_STRIDE + j * FRAGMENT + row;
      place[0] = products.fragments[j][i].x;
      place[SCORE_STRIDE] = products.fragments[j][i].y;
    }
  }
  if (COLUMN_SIMDGROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    // Of the SIMD groups that share rows.
    const int group = ROW_SIMDGROUPS > 1 ? simdgroup / COLUMN_SIMDGROUPS : 0;
    const int first = group * COLUMN_SIMDGROUPS;
    threadgroup float* sums = tiles + (SIMDGROUPS + group) * SCORE_TILE;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = (simdgroup - first) * SIMD_LANES + lane; n < ROWS * BLOCK_K;
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
          tile + (i * FRAGMENT + row) * SCORE_STRIDE + j * FRAGMENT + column);
    }
  }
}

// Whether fragment n of q is the SIMD group's to load. Those of a span are multiplied together.
METAL_FUNC bool loads_fragment(short n, int key_simdgroup) {
  return (HADAMARD ? n / SPAN_FRAGMENTS : n) % KEY_SIMDGROUPS == key_simdgroup;
}

// Gives each SIMD group the fragments of q that others have loaded.
METAL_FUNC void exchange_query_fragments(thread QueryTile& q_tile,
                                         threadgroup Fragment<ELEMENT>* pairs, int key_simdgroup,
                                         ushort lane) {
  if (KEY_SIMDGROUPS == 1) {
    return;
  }
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (loads_fragment(n, key_simdgroup)) {
        pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane] = q_tile.fragments[n][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      q_tile.fragments[n][i] = pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane];
    }
  }
}

// The new tokens that `given` tells of, which the threadgroup keeps in `tokens`. Windows and chunks
// count positions by depth. Every thread calls it, in uniform control flow.
METAL_FUNC void load_tree(thread TokenTree& tree, threadgroup uint4* tokens,
                          thread const GivenTree& given, int thread_index,
                          thread const Visibility& visible) {
  tree.tokens = tokens;
  tree.count = given.count;
  for (int i = thread_index; i < given.count; i += THREADS) {
    TreeToken token = given.token(i);
    token.begin = visible.keys_of(max(token.depth, 0)).begin;
    token.seen.drop_first(token.begin - (visible.existing.end - given.count));
    tokens[i] = token.words();
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A lane's rows of the tile that begins at `first_row` of a KV head's `all_rows`.
METAL_FUNC void reset_rows(thread TileRow* rows, int first_row, int all_rows, int kv_head,
                           ushort own_row, constant FlashParams& problem) {
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    rows[i].reset(first_row + min(i * FRAGMENT + own_row, ROWS - 1), all_rows, kv_head, problem);
  }
}

// A tile of rows of q, whose scores arrive block by block.
struct DecodeRows {
  TileRow rows[ROW_FRAGMENTS];  // the lane's
  Rules<1, false> rules[ROW_FRAGMENTS];
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  Range seen_by_first;  // keys
  Range seen_by_last;

  // The tile from `first_row` on of a KV head's `all_rows`.
  METAL_FUNC void reset(thread const FlashInputs& inputs, int first_row, int all_rows, int batch,
                        int kv_head, thread const DecodeLane& own, thread const TokenTree& tree,
                        thread const Visibility& visible, thread const Sequence& sequence,
                        constant FlashParams& problem) thread {
    reset_rows(rows, first_row, all_rows, kv_head, own.row, problem);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      softmax[i].reset();
      rules[i].reset(inputs, batch, rows[i].head, rows[i].query, own.column, visible, sequence,
                     problem);
    }
    const int last_row = min(first_row + ROWS, all_rows) - 1;
    seen_by_first = visible.keys_of(first_row / problem.queries_per_kv);
    seen_by_last = visible.keys_of(last_row / problem.queries_per_kv);
    if (TREE) {  // of any path
      seen_by_last = visible.keys_of(tree.count - 1);
      seen_by_first.end = visible.existing.end - tree.count;
    }
  }

  // Products become weights, exp(score - row_max). `corrections`: as OnlineSoftmax::update's.
  METAL_FUNC void weigh(thread ScoreRow* scores, thread float* corrections,
                        thread const BlockKeys& block, int kv_block, bool masked, ushort lane,
                        thread const TokenTree& tree, thread const Visibility& visible,
                        thread const FlashInputs& inputs, constant FlashParams& problem) thread {
    const bool hides = kv_block < seen_by_last.begin || kv_block + BLOCK_K > seen_by_first.end;
    const ushort column = fragment_column(lane);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      rules[i].value(scores[i], kv_block, masked, inputs, problem);
      if (INDICES) {
        hide_listed(scores[i], block, lane, visible.keys_of(rows[i].query));
      } else if (TREE && hides) {
        hide_tokens(scores[i], tree.token(rows[i].query), kv_block + column,
                    visible.existing.end - tree.count);
      } else if (hides) {
        visible.apply<false>(scores[i], rows[i].query, kv_block + column);
      }
      corrections[i] = softmax[i].update<KEY_FRAGMENTS>(scores[i].fragments[0]);
    }
  }

  // Of keys from `column` on, masks out those that a new token does not see. `first_new`: the first
  // token's key.
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

  // Of listed keys, which lie anywhere: masks out those that a query does not see. One that does
  // not exist is NaN.
  METAL_FUNC static void hide_listed(thread ScoreRow& scores, thread const BlockKeys& block,
                                     ushort lane, Range seen) {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const vec<int, 2> keys = block.column_rows(j, lane);
      UNROLL
      for (short e = 0; e < LANE_COLUMNS; e++) {
        const float hidden = keys[e] == IMPOSSIBLE_ROW ? NAN : -INFINITY;
        const bool shown = keys[e] >= seen.begin && keys[e] < seen.end;
        scores.fragments[0][j][e] = shown ? scores.fragments[0][j][e] : hidden;
      }
    }
  }

  // The maximum of row i over all SIMD groups. `states`: of each, the row's maximum and sum.
  METAL_FUNC float joined_max(short i, const threadgroup float2* states, ushort row) const thread {
    const threadgroup float2* row_states = states + min(i * FRAGMENT + row, ROWS - 1);
    float row_max = softmax[i].row_max;
    UNROLL
    for (short n = 0; KEY_SIMDGROUPS > 1 && n < KEY_SIMDGROUPS; n++) {
      row_max = max(row_max, row_states[n * ROWS].x);
    }
    return row_max;
  }

  // The row's sum over all SIMD groups, relative to that maximum.
  METAL_FUNC float joined_sum(short i, float own_sum, float row_max,
                              const threadgroup float2* states, ushort row) const thread {
    if (KEY_SIMDGROUPS == 1) {
      return own_sum;
    }
    const threadgroup float2* row_states = states + min(i * FRAGMENT + row, ROWS - 1);
    float sum = 0.0f;
    UNROLL
    for (short n = 0; n < KEY_SIMDGROUPS; n++) {
      const float2 state = row_states[n * ROWS];
      sum += state.y * fast::exp2(state.x - row_max);
    }
    return sum;
  }
};

// Columns of span `span` of a row of q, times the Hadamard matrix: a lane's share of its transpose.
// Every lane takes part, each with a row of its own.
METAL_FUNC void load_hadamard_span(thread float* values, thread const Queries& queries, int query,
                                   int span, thread const DecodeLane& own) {
  const int first_span = span / max(HADAMARD_SPANS, 1) * HADAMARD_SPANS;
  UNROLL
  for (short f = 0; f < SPAN_FRAGMENTS; f++) {
    values[f] = 0.0f;
    UNROLL
    for (short n = 0; n < HADAMARD_SPANS; n++) {
      const int column = (first_span + n) * SPAN_COLUMNS + span_column(own.row, f);
      const float value = column < HEAD_DIM_QK ? float(queries.element(query, column)) : 0.0f;
      values[f] += value * hadamard_sign(n, span - first_span);
    }
  }
  hadamard_values<SPAN_FRAGMENTS>(values);
  UNROLL
  for (ushort bit = 1; bit < FRAGMENT; bit *= 2) {
    hadamard_lanes<SPAN_FRAGMENTS>(values, own.lane, row_lane(bit));
  }
}

// q transposed, [D, ROWS]. SIMD groups that have the same columns load, and rotate, a share each.
METAL_FUNC void load_queries(thread QueryTile& q_tile, threadgroup Fragment<ELEMENT>* pairs,
                             thread const FlashInputs& inputs, int first_row, int all_rows,
                             int batch, int kv_head, thread const DecodeLane& own,
                             thread const Sequence& sequence, thread const TokenTree& tree,
                             int64_t first_rotary, constant FlashDecodeParams& params) {
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short e = 0; e < LANE_COLUMNS; e++) {
      TileRow other;
      other.reset(first_row + i * FRAGMENT + own.column + e, all_rows, kv_head, params.problem);
      Queries queries = inputs.queries(batch, other.head, sequence, params.problem);
      if (APPEND && Q_ROTARY) {
        queries.rotary.start_at(first_rotary, params.rotate_q_by_token != 0);
        if (TREE && params.rotate_q_by_token != 0) {
          // The query's number will be added to the row, and its depth is what counts.
          const int depth = max(tree.depth_of(other.query), 0);
          queries.rotary.start_at(depth - other.query, true);
        }
      }
      UNROLL
      for (short s = 0; HADAMARD && s < OWN_QK_SPANS; s++) {
        if (loads_fragment(s * SPAN_FRAGMENTS, own.key_simdgroup)) {
          float values[SPAN_FRAGMENTS];
          load_hadamard_span(values, queries, other.query, own.span(s), own);
          UNROLL
          for (short f = 0; f < SPAN_FRAGMENTS; f++) {
            q_tile.fragments[s * SPAN_FRAGMENTS + f][i][e] = ELEMENT(values[f] * HADAMARD_SCALE);
          }
        }
      }
      UNROLL
      for (short n = 0; !HADAMARD && n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
        const int d =
            own.span(n / SPAN_FRAGMENTS) * SPAN_COLUMNS + span_column(own.row, n % SPAN_FRAGMENTS);
        if (loads_fragment(n, own.key_simdgroup)) {
          q_tile.fragments[n][i][e] =
              d < HEAD_DIM_QK ? queries.element(other.query, d) : ELEMENT(0);
        }
      }
    }
  }
  exchange_query_fragments(q_tile, pairs, own.key_simdgroup, own.lane);
}
