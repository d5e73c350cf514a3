// Attention of few queries over many keys, which are split over the grid.
//
// Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023).
//
// The kernel is bound by memory, so each row of k and v is read once: the queries of all heads that
// share a KV head are rows of one tile, [ROWS, D]. Lanes load k and v into fragments without
// staging (spans.h). In a tile of products a row is a key and a column is a query, so that k and v
// are loaded in the same way. The tile is then transposed in threadgroup memory.
//
// KEY_SIMDGROUPS SIMD groups walk over different keys and merge their states at the end. If a tile
// takes too many registers for one SIMD group, COLUMN_SIMDGROUPS SIMD groups share the same keys
// instead. Each has some spans of q, k, v and out, and they add up their parts of the scores.
// ROW_SIMDGROUPS such sets have different rows and the same keys. Each SIMD group loads a part of a
// block, and they exchange the parts.
#include "decode_matrix.h"
#include "decode_rows.h"
#include "decode_vector.h"

// The host defines ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, ROW_FRAGMENTS, KEY_FRAGMENTS, KEY_SIMDGROUPS,
// COLUMN_SIMDGROUPS, and ROW_SIMDGROUPS if it is not 1; SPLIT if there is more than one split;
// V_IN_K if v is the first columns of k; the features of flash_fwd except VARLEN, DROPOUT and
// K_ROTARY, or FLEX; PACKED_Q if sequences differ in their number of queries; APPEND with
// WIDE_STORES, NEW_K_ROTARY and PACKED_NEW_K; INDEX_BLOCK if keys are listed; and ROW_LOOP if a
// threadgroup has several tiles of rows, whose loop needs more registers.
//
// With PACKED_Q, the threadgroups after those of the last sequence fill the rows of no sequence.

using OutRows = conditional_t<VECTOR_ROWS != 0, VectorOut<KEY_LANES>, MatrixOut>;

// Attention of a task's rows over its split of the keys.
METAL_FUNC void attend(thread const FlashInputs& inputs, thread const DecodeTask& task,
                       thread const DecodeMemory& memory, thread const DecodeLane& lane,
                       device Result* out, device float* softmax_lse,
                       constant FlashDecodeParams& params) {
  constant FlashParams& problem = params.problem;
  DecodeKv kv;
  kv.reset(inputs, task, memory, lane, problem);

  // With APPEND row_groups is 1: another row group would not see the new keys.
  for (int group_row = task.share.begin; group_row < task.share.end; group_row += task.share.step) {
    const int first_row = group_row + lane.row_simdgroup * ROWS;
    DecodeRows rows;
    rows.reset(inputs, task, first_row, lane, problem);
    OutRows o;  // [ROWS, Dv]
    o.reset(memory, lane);
    QueryTile q_tile;  // [D, ROWS]
    load_queries(q_tile, memory.q, inputs, task, first_row, lane, params);

    for (int step = kv.places.begin + lane.key_simdgroup * BLOCK_K; step < kv.places.end;
         step += STEP_K) {
      const int kv_block = kv.blocks.row_at(step);
      if (BLOCK_LISTS && kv_block >= kv.sequence.kv_length) { continue; }
      BlockKeys block;
      block.begin(kv, kv_block);
      ProductTile products;  // [BLOCK_K, ROWS]
      block.multiply_keys(products, q_tile, kv);
      ScoreRow scores[ROW_FRAGMENTS];  // [8, BLOCK_K] each
      transpose_scores(scores, products, memory.scores, lane);
      float corrections[ROW_FRAGMENTS];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        rows.rules[i].value(scores[i], kv_block, kv.blocks.masked, inputs, problem);
        rows.hide_unseen(scores[i], i, block, task, lane);
        // From here on `scores` holds weights, exp(score - row_max).
        corrections[i] = rows.softmax[i].update<KEY_FRAGMENTS>(scores[i].fragments[0]);
      }
      o.accumulate(block, kv, scores, corrections);
    }

    TileResult result;
    result.reset(out, softmax_lse, task, first_row, lane.row, params);
    float row_sums[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      row_sums[i] = kv.blocks.impossible ? NAN : rows.softmax[i].row_sum();
      if (TREE && task.tree.depth_of(result.rows[i].query) < 0) { row_sums[i] = NAN; }
    }
    rows.store_states(memory.states, row_sums, lane);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (VECTOR_ROWS != 0 && lane.column != 0) { continue; }
      const int tile_row = i * FRAGMENT + lane.row;
      RowTotal total;
      total.join(rows.softmax[i], row_sums[i], memory.states, tile_row);
      total.add_sink(inputs, result.rows[i].head);
      // A row that sees no key is 0, even if 0 * NaN of a masked value was added.
      const bool sees_nothing = row_sums[i] == 0.0f;
      const float correction = fast::exp2(rows.softmax[i].row_max - total.softmax.row_max);
      o.scale_row(i, correction / total.sum, sees_nothing);
      if (lane.stores_lse() && tile_row < ROWS && result.has_row(tile_row)) {
        result.split.store_lse(result.rows[i], SPLIT ? total.softmax.row_max : total.logsumexp(),
                               total.sum, params);
      }
    }
    o.write(result, params);
    if (!ROW_LOOP) { break; }
  }
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_decode(
    FLASH_PARAMETERS device Result* out [[buffer(FLASH_DECODE_OUT)]],
    device float* softmax_lse [[buffer(FLASH_DECODE_LSE)]],
    GRID_PARAMS(FlashDecodeParams, FLASH_PARAMS), GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashDecodeParams)
  threadgroup float score_tiles[SCORES];
  threadgroup float weight_tiles[WEIGHTS];
  threadgroup Fragment<float> out_tile[OUT_PAIRS];
  threadgroup Fragment<ELEMENT> q_pairs[QUERY_PAIRS];
  threadgroup float2 states[STATES];
  threadgroup LoadedPair loaded_pairs[LOADED_PAIRS];
  THREADGROUP_ARRAY(TREE, uint4, tree_tokens, TREE_TOKENS)
  const DecodeMemory memory = {score_tiles, weight_tiles, out_tile, q_pairs, states, loaded_pairs};

  FlashInputs inputs;
  FLASH_SET_INPUTS
  DecodeTask task;
  task.reset(inputs, threadgroup_position, threadgroups, params);
  SplitResult result;
  result.reset(out, softmax_lse, task.split, task, params);
  if (PACKED_Q && task.batch == params.problem.batch) {
    const float value = task.sequence.impossible ? NAN : 0.0f;
    result.fill(value, task, inputs, thread_index, params);
    return;
  }
  task.load_tree(inputs, tree_tokens, thread_index, params);
  task.append(inputs, thread_index, params);
  if (task.is_impossible(params.problem)) {
    result.fill(NAN, task, inputs, thread_index, params);
    return;
  }
  DecodeLane decode_lane;
  decode_lane.reset(simdgroup, lane);
  attend(inputs, task, memory, decode_lane, out, softmax_lse, params);
}
