// Attention of few queries over many keys, which are split over the grid.
//
// Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023).
//
// Bound by memory, so each row of k and v is read once: the queries of all heads that share a KV
// head are rows of one tile, [ROWS, D]. Nothing of k and v is staged: lanes load them straight into
// fragments (spans.h). Scores are computed transposed, keys by queries, so that k and v are read
// alike, and transposed back in threadgroup memory.
//
// KEY_SIMDGROUPS walk over different keys and join their states at the end. Where a tile's
// registers are too many for one SIMD group, COLUMN_SIMDGROUPS share the same keys instead: each
// has its spans of q, k, v and out, and they add up their parts of the scores. ROW_SIMDGROUPS such
// groups have other rows and the same keys: each loads a share of a block, and they exchange them.
#include "decode_append.h"
#include "decode_rows.h"
#include "decode_vector.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, ROW_FRAGMENTS,
// KEY_FRAGMENTS, KEY_SIMDGROUPS, COLUMN_SIMDGROUPS, ROW_SIMDGROUPS if not 1, WIDE_LOADS; SPLIT if
// there is more than one split, V_IN_K if v is the first columns of k; the features of flash_fwd
// but VARLEN, DROPOUT and K_ROTARY, or FLEX; PACKED_Q if sequences differ in their number of
// queries; to append new keys first APPEND, WIDE_STORES, NEW_K_ROTARY and PACKED_NEW_K; INDEX_BLOCK
// if keys are listed; and ROW_LOOP if threadgroups own more than one tile of rows. Without it
// nothing that a tile begins with has to last, in registers, until the next one.
//
// With PACKED_Q the threadgroups after those of the last sequence fill rows of no sequence.

// Whether a SIMD group's rows leave few registers for anything else.
constant constexpr bool MANY_ROWS = ROW_FRAGMENTS > 2;

using OutRows = conditional_t<VECTOR_ROWS != 0, VectorOut<KEY_LANES>, MatrixOut>;

// Results of rows that are not computed. Splits leave the sink to their merging.
METAL_FUNC void fill_rows(thread const SplitResult& result, thread const FlashInputs& inputs,
                          float value, int rows, int kv_head, int first, int step,
                          constant FlashDecodeParams& params) {
  for (int n = first; n < rows; n += step) {
    TileRow one;
    one.reset(n, rows, kv_head, params.problem);
    OutRow out_row;
    result.place(out_row, one.head, params);
    out_row.fill(value, one.query, one.query + 1, 1);
    float lse = isnan(value) ? value : -INFINITY;
    WHEN(SINK, if (!SPLIT && !isnan(value)) { lse = float(inputs.learnable_sink[one.head]); })
    result.store_lse(one, lse, params);
  }
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_decode(
    FLASH_PARAMETERS device Result* out [[buffer(FLASH_DECODE_OUT)]],
    device float* softmax_lse [[buffer(FLASH_DECODE_LSE)]],
    GRID_PARAMS(FlashDecodeParams, FLASH_PARAMS), GRID_POSITION_AND_SIZE,
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  SET_GRID_POSITION_AND_SIZE(FlashDecodeParams)
  threadgroup float score_tiles[SCORES];               // [SCORE_TILES, ROWS, BLOCK_K]
  threadgroup float weight_tiles[WEIGHTS];             // [SIMDGROUPS, BLOCK_K + 1, ROWS]
  threadgroup Fragment<float> out_tile[OUT_PAIRS];     // [ROWS, Dv]
  threadgroup Fragment<ELEMENT> q_pairs[QUERY_PAIRS];  // [D, ROWS]
  threadgroup float2 states[STATES];  // [KEY_SIMDGROUPS, ROWS] of row_max and row_sum
  threadgroup Fragment<KvTileElement> loaded_pairs[LOADED_PAIRS];  // BlockKeys::share_units

  THREADGROUP_ARRAY(TREE, uint4, tree_tokens, TREE_TOKENS)

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;
  const int split = threadgroup_position.x;
  const int splits = threadgroups.x;
  const int kv_head = int(threadgroup_position.y) / params.row_groups;
  const int row_group = int(threadgroup_position.y) % params.row_groups;
  const int batch = threadgroup_position.z;
  Sequence sequence = inputs.sequence(batch, problem);
  const int rows = sequence.q_length * problem.queries_per_kv;
  const int fill_first = row_group * THREADS + thread_index;
  const int fill_step = params.row_groups * THREADS;
  SplitResult result;
  result.reset(out, softmax_lse, split, batch, sequence.q_start, params);
  if (PACKED_Q && batch == problem.batch) {
    fill_rows(result, inputs, sequence.impossible ? NAN : 0.0f, rows, kv_head, fill_first,
              fill_step, params);
    return;
  }

  TokenTree tree;
  if (TREE) {
    const int64_t first = batch * params.tree_batch_stride;
    GivenTree given;
    given.parents = inputs.parents + (TREE_PARENTS ? first + sequence.q_start : 0);
    given.row_stride = params.tree_row_stride;
    given.rows = inputs.tree_mask + (TREE_MASK ? first + sequence.q_start * given.row_stride : 0);
    given.count = min(sequence.q_length, problem.q_length);
    Visibility of_depths;
    of_depths.reset(sequence, problem);
    load_tree(tree, tree_tokens, given, thread_index, of_depths);
    sequence.impossible =
        sequence.impossible || sequence.kv_length - sequence.q_length < sequence.first_key;
  }
  int old_length = 0;  // APPEND
  int64_t first_rotary = 0;
  if (APPEND) {
    old_length = inputs.seqused_k[batch];
    // The other splits only read keys that were there before.
    if (split == splits - 1) {
      append(inputs, tree, old_length, batch, kv_head, thread_index, THREADS, problem,
             params.append);
      threadgroup_barrier(mem_flags::mem_device);
    }
  }
  if (APPEND && Q_ROTARY) {
    first_rotary =
        int64_t(old_length) - (params.append.rotary_from_leftpad != 0 ? sequence.first_key : 0);
    const int rotary_rows =
        params.rotate_q_by_token != 0 ? sequence.q_length : min(sequence.q_length, 1);
    sequence.impossible = sequence.impossible || first_rotary < 0 ||
                          first_rotary + rotary_rows > params.append.table_rows;
  }
  // Keys of missing pages are read as those of the first page, which must exist.
  sequence.impossible =
      sequence.impossible || (PAGED && problem.cache_size == 0 && sequence.kv_length > 0);
  if ((TREE || PACKED_Q || SEQUSED_K || LEFTPAD_K || CACHE_BATCH_IDX || PAGED) &&
      sequence.impossible) {
    fill_rows(result, inputs, NAN, rows, kv_head, fill_first, fill_step, params);
    return;
  }

  DecodeLane own;
  own.reset(simdgroup, lane);
  Visibility visible;
  visible.reset(sequence, problem);
  RowShare share;
  share.reset(row_group, rows, params);
  Range seen;
  seen.begin = visible.keys_of(INDICES ? share.begin / problem.queries_per_kv : 0).begin;
  seen.end =
      visible.keys_of(INDICES ? (share.end - 1) / problem.queries_per_kv : sequence.q_length - 1)
          .end;
  // One list for all rows: steps are counted along its blocks.
  const int list = PACKED_Q ? sequence.q_start + min(share.list, sequence.q_length) : share.list;
  DecodeBlocks blocks;
  blocks.reset(inputs, problem.flex, batch, INDICES ? kv_head : kv_head * problem.queries_per_kv,
               list, seen);
  const Range places = keys_of_split(blocks.places(), old_length, split, splits);
  Keys keys = inputs.keys(batch, kv_head, sequence, problem);
  Values values = inputs.values(batch, kv_head, sequence, problem);

  // With new keys there is one row group, whose threadgroups alone see them written.
  for (int group_row = share.begin; group_row < share.end; group_row += share.step) {
    const int first_row = group_row + own.row_simdgroup * ROWS;
    DecodeRows tile;
    tile.reset(inputs, first_row, rows, batch, kv_head, own, tree, visible, sequence, problem);
    OutRows o;  // [ROWS, Dv]
    o.reset(score_tiles, weight_tiles, own);
    QueryTile q_tile;  // [D, ROWS]
    load_queries(q_tile, q_pairs, inputs, first_row, rows, batch, kv_head, own, sequence, tree,
                 first_rotary, params);

    for (int step = places.begin + own.key_simdgroup * BLOCK_K; step < places.end; step += STEP_K) {
      const int kv_block = blocks.row_at(step);
      if (BLOCK_LISTS && kv_block >= sequence.kv_length) {
        continue;
      }
      BlockKeys block;
      move_to(keys, values, kv_block, BLOCK_K, lane);
      block.reset(keys, values, blocks, kv_block, own.row, sequence);
      if (ROW_SIMDGROUPS > 1) {
        block.share_units(loaded_pairs, keys, values, own);
      }
      ProductTile products;  // [BLOCK_K, ROWS]
      block.multiply(products, q_tile, keys, loaded_pairs, own);
      ScoreRow scores[ROW_FRAGMENTS];  // [8, BLOCK_K] each
      transpose_scores(scores, products, score_tiles, simdgroup, lane);
      // From here on `scores` holds weights.
      float corrections[ROW_FRAGMENTS];
      tile.weigh(scores, corrections, block, kv_block, blocks.masked, own.lane, tree, visible,
                 inputs, problem);
      o.accumulate(block, corrections, scores, values, loaded_pairs, blocks, kv_block, sequence);
    }

    // Where results go is computed again, so that it takes no registers in the loop: 6 of M1's. Of
    // what is broadcast the compiler does not know that it has it already.
    SplitResult results;
    results.reset(out, softmax_lse, MANY_ROWS ? simd_broadcast(split, ushort(0)) : split, batch,
                  sequence.q_start, params);
    TileRow result_rows[ROW_FRAGMENTS];
    reset_rows(result_rows, MANY_ROWS ? simd_broadcast(first_row, ushort(0)) : first_row, rows,
               kv_head, own.row, problem);
    float row_sums[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      row_sums[i] = blocks.impossible ? NAN : tile.softmax[i].row_sum();
      if (TREE && tree.depth_of(result_rows[i].query) < 0) {
        row_sums[i] = NAN;
      }
      if (KEY_SIMDGROUPS > 1 && own.column == 0 && i * FRAGMENT + own.row < ROWS) {
        states[simdgroup * ROWS + i * FRAGMENT + own.row] =
            float2(tile.softmax[i].row_max, row_sums[i]);
      }
    }
    if (KEY_SIMDGROUPS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (VECTOR_ROWS != 0 && own.column != 0) {
        continue;  // another lane has the row's share
      }
      const int head = result_rows[i].head;
      OnlineSoftmax total = tile.softmax[i];
      total.row_max = tile.joined_max(i, states, own.row);
      float total_sum = tile.joined_sum(i, row_sums[i], total.row_max, states, own.row);
      if (SINK && !SPLIT) {
        // Splits leave it to their merging, which counts it once.
        const float keys_max = total.row_max;
        total.row_max = max(keys_max, inputs.sink_log2(head));
        total_sum = total_sum * fast::exp2(keys_max - total.row_max) +
                    inputs.sink_weight(head, total.row_max);
      }
      // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
      const bool sees_nothing = row_sums[i] == 0.0f;
      o.scale_row(i, fast::exp2(tile.softmax[i].row_max - total.row_max) / total_sum, sees_nothing);
      const int tile_row = i * FRAGMENT + own.row;
      if (own.key_simdgroup == 0 && own.first_span == 0 && own.column == 0 && tile_row < ROWS &&
          first_row + tile_row < share.end) {
        results.store_lse(result_rows[i], total.logsumexp(total_sum), params);
      }
    }
    o.write_rows(out_tile, first_row, share.end, kv_head, result_rows, results, params);
    if (!ROW_LOOP) {
      break;
    }
  }
}
