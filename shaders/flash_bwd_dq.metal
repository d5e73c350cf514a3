// Attention backward: the gradient of q, dq = scale * (weights * (dout v^T - delta)) k.
//
// Dao, "FlashAttention-2" (2023), algorithm 2, with its loops exchanged: a threadgroup owns BLOCK_Q
// queries and walks over the keys, so that no other threadgroup writes its rows.
//
// delta is rowsum(dout * out), and out is rounded. With EXACT_DELTA the walk also sums the
// gradients of each row's scores. The exact value of this sum is known, and the difference from it
// is the error of delta. If that error is too large, a second pass over the keys corrects dq.
//
// The log-sum-exp is rounded, too, and large scores make its error visible in float32 gradients.
// With NORMALISED, weights are divided by the sum of exp(score - log-sum-exp).
#include "dq.h"
#include "own_rows.h"

// The host defines what flash_fwd needs; DQ_SLICE, the columns of dq that a threadgroup owns;
// ROWS_IN_REGISTERS for q and dout; EXACT_DELTA, which NORMALISED needs; DLSE if the log-sum-exp
// has a gradient; and FLEX_SLOPE with FLEX.
constant constexpr int V_PAIRS_BYTES = BLOCK_K * padded(V_COLUMNS) * sizeof(ELEMENT);
constant constexpr int K_PAIRS_BYTES =
    with_shared(BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT), V_PAIRS_BYTES);
constant constexpr int VOTES_BYTES = EXACT_DELTA ? ARRAY_BYTES(SIMDGROUPS * sizeof(float)) : 0;
constant constexpr int PARTS = SIMDGROUPS * ROW_FRAGMENTS * KEY_FRAGMENTS * SIMD_LANES;
// A SIMD group's share of the columns.
constant constexpr int OWN_QK_COLUMNS = QK_COLUMNS / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_COLUMNS = V_COLUMNS / COLUMN_SIMDGROUPS;

static_assert(K_PAIRS_BYTES + apart(V_PAIRS_BYTES) + VOTES_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");

using QueryTile = OwnRows<Queries, OWN_QK_COLUMNS>;
using GradientTile = OwnRows<OutGradients, OWN_V_COLUMNS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dq(
    FLASH_BWD_PARAMETERS device ELEMENT* dq [[buffer(FLASH_BWD_DQ)]],
    GRID_PARAMS(FlashBwdParams, FLASH_PARAMS), GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashBwdParams)
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  // [BLOCK_K / 2, Dv] pairs of keys
  UNLESS(TILES_SHARED, threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];)
  WHEN(TILES_SHARED, threadgroup uint4* const v_pairs = k_pairs;)
  THREADGROUP_ARRAY(ROWS_IN_THREADGROUP, uint4, q_chunks, SIMDGROUPS * QueryTile::SIZE)
  THREADGROUP_ARRAY(ROWS_IN_THREADGROUP, uint4, dout_chunks, SIMDGROUPS * GradientTile::SIZE)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, score_parts, PARTS)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, gradient_parts, PARTS)
  THREADGROUP_ARRAY(EXACT_DELTA, float, votes, SIMDGROUPS)

  FLASH_BWD_SET_INPUTS

  DqQueries queries;
  if (!queries.begin(inputs, buffers, dq, params, threadgroup_position, threadgroups, thread_index,
                     simdgroup, lane)) {
    return;
  }
  const int batch = queries.place.batch;
  const int head = queries.place.head;
  const Sequence sequence = queries.sequence;
  const Keys keys = inputs.keys(batch, queries.place.kv_head, sequence, problem);
  const Values values = inputs.values(batch, queries.place.kv_head, sequence, problem);
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int first_qk = queries.part * OWN_QK_COLUMNS;
  const int first_v = queries.part * OWN_V_COLUMNS;
  const int first_dq = queries.part * OWN_DQ_COLUMNS;

  const threadgroup Pair* k_lane =
      lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column) + first_qk;
  const threadgroup Pair* v_lane =
      lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column) + first_v;
  const auto k_rows_lane =
      lane_of_paired_rows<ELEMENT, QK_COLUMNS, DQ_SLICES * DQ_SLICE == QK_COLUMNS>(
          k_pairs, row, column, queries.place.slice * DQ_SLICE + first_dq);
  QueryTile q_tile;        // [ROW_FRAGMENTS * 8, D]
  GradientTile dout_tile;  // [ROW_FRAGMENTS * 8, Dv]
  q_tile.keep_in(q_chunks, simdgroup, lane);
  dout_tile.keep_in(dout_chunks, simdgroup, lane);
  q_tile.load(inputs.queries(batch, head, sequence, problem), queries.first_query,
              queries.last_query, column + first_qk);
  dout_tile.load(buffers.out_gradients(params.dout_strides, batch, head, sequence),
                 queries.first_query, queries.last_query, column + first_v);

  Rules<ROW_FRAGMENTS, false> rules;
  rules.reset(inputs, batch, head, queries.first_query, column, queries.visible, sequence, problem);
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
  DqRows rows;
  rows.load(queries);
  DqTile dq_tile;
  dq_tile.fill(0.0f);
  Blocks<LIST_KV_BLOCK> blocks;
  blocks.reset(inputs, problem.flex, batch, head, queries.place.first_query / LIST_Q_BLOCK,
               queries.keys());

  bool second_pass = false;
  for (short pass = 0; pass < PASSES; pass++) {
    for (int block = blocks.first(); !blocks.done; block = blocks.next(block + BLOCK_K)) {
      // Wait until every SIMD group has read the previous tiles.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
          k_pairs, keys, block, sequence.first_key, sequence.kv_length, thread_index);
      if (pass == 0 && !TILES_SHARED) {
        stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
            v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
      }
      // Wait until the tiles are completely written.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool seen = queries.seen.any_in(block, BLOCK_K);
      ScoreTile scores;
      ScoreTile gradients;  // d loss / d weight, then d loss / d score
      if (TILES_SHARED) {
        if (seen) { multiply_transposed<ELEMENT, QK_COLUMNS>(scores, q_tile, k_lane); }
        if (pass == 0) {
          // Wait until every SIMD group has read the keys.
          threadgroup_barrier(mem_flags::mem_threadgroup);
          stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
              v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          if (seen) { multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_lane); }
          // Wait until every SIMD group has read the values. dq needs the keys again.
          threadgroup_barrier(mem_flags::mem_threadgroup);
          stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
              k_pairs, keys, block, sequence.first_key, sequence.kv_length, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
      }
      if (COLUMNS_SPLIT) {
        if (seen) {
          multiply_transposed<ELEMENT, QK_COLUMNS, OWN_QK_COLUMNS>(scores, q_tile, k_lane);
          store_part(scores, score_parts, simdgroup, lane);
          if (pass == 0) {
            multiply_transposed<ELEMENT, V_COLUMNS, OWN_V_COLUMNS>(gradients, dout_tile, v_lane);
            store_part(gradients, gradient_parts, simdgroup, lane);
          }
        }
        // Wait until all parts are written.
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (!seen || (pass > 0 && !second_pass)) { continue; }
      ScoreTile slopes;
      if (COLUMNS_SPLIT) {
        add_other_part(scores, score_parts, simdgroup, lane);
      } else if (!TILES_SHARED) {
        multiply_transposed<ELEMENT, QK_COLUMNS>(scores, q_tile, k_lane);
      }
      rules.value_and_slope(scores, slopes, block, blocks.masked, inputs, problem);
      queries.hide_unseen(scores, slopes, block, column);
      if (pass == 0) {
        if (COLUMNS_SPLIT) {
          add_other_part(gradients, gradient_parts, simdgroup, lane);
        } else if (!TILES_SHARED) {
          multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_lane);
        }
        dropout.apply(gradients, dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(
                                     queries.first_query, block + column));
      } else {
        gradients.fill(0.0f);
      }
      rows.differentiate(gradients, scores);
      if (SCORE_DERIVATIVES) { gradients.multiply(slopes); }
      accumulate<ELEMENT, DQ_SLICE, OWN_DQ_COLUMNS>(dq_tile, gradients, k_rows_lane);
    }
    if (!EXACT_DELTA || pass > 0) { break; }
    second_pass = rows.check_delta(queries, inputs, column);
    if (!any_simdgroup(second_pass, votes, simdgroup, lane)) { break; }
  }
  if (blocks.impossible) { dq_tile.fill(NAN); }
  rows.write(dq_tile, queries, column + first_dq, problem.softmax_scale);
}
