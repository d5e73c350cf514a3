// The gradient of q on tensor tiles: flash_bwd_dq.metal with Metal 4's tensor operations.
//
// As in flash_fwd_tensor.metal, a SIMD group owns 16 queries and nothing is staged. With
// COLUMN_SIMDGROUPS two SIMD groups own the same queries and half of the columns each.
#define TENSOR_TILES 1

#include "dq.h"
#include "tensor_products.h"

// The host defines what flash_bwd_dq needs, without flex. Without ROWS_IN_REGISTERS, q and dout are
// read again for each block. ELEMENT is float only if TF32 is allowed.
constant constexpr int OWN_QK_COLUMNS = own_spans(HEAD_DIM_QK) * SPAN_COLUMNS;
constant constexpr int OWN_V_COLUMNS = own_spans(HEAD_DIM_V) * SPAN_COLUMNS;

static_assert(BLOCK_K == SPAN_COLUMNS, "a product gives scores of 32 keys");
static_assert(SIMDGROUP_ROWS == TENSOR_SIMDGROUP_ROWS, "a product gives scores of 16 queries");
static_assert(OWN_DQ_COLUMNS % SPAN_COLUMNS == 0, "a slice of dq is whole spans");

using QueryTile = QueryRows<ELEMENT, Queries, HEAD_DIM_QK, ROWS_IN_REGISTERS>;
using GradientTile = QueryRows<ELEMENT, OutGradients, HEAD_DIM_V, ROWS_IN_REGISTERS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dq_tensor(
    FLASH_BWD_PARAMETERS device ELEMENT* dq [[buffer(FLASH_BWD_DQ)]],
    GRID_PARAMS(FlashBwdParams, FLASH_PARAMS), GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashBwdParams)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, score_parts, TENSOR_FRAGMENTS * THREADS)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, gradient_parts, TENSOR_FRAGMENTS * THREADS)
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
  const ushort column = lane_column(lane);
  const int first_dq = queries.part * OWN_DQ_COLUMNS;

  QueryTile q_tile;        // [16, own columns of D]
  GradientTile dout_tile;  // [16, own columns of Dv]
  q_tile.load(inputs.queries(batch, head, sequence, problem), queries.first_query,
              queries.last_query, column + queries.part * OWN_QK_COLUMNS);
  dout_tile.load(buffers.out_gradients(params.dout_strides, batch, head, sequence),
                 queries.first_query, queries.last_query, column + queries.part * OWN_V_COLUMNS);

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
      const bool seen = queries.seen.any_in(block, BLOCK_K);
      ScoreTile scores;
      ScoreTile gradients;  // d loss / d weight, then d loss / d score
      KeyPlaces<Keys> key_places;
      key_places.find(keys, block, sequence.first_key, sequence.kv_length, row);
      KeyPlaces<Values> value_places;
      value_places.find(values, block, sequence.first_key, sequence.kv_length, row);
      if (COLUMNS_SPLIT) {
        // Wait until both SIMD groups have read the previous parts.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (seen) {
          multiply_transposed<ELEMENT, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
          store_part(scores, score_parts, simdgroup, lane);
          if (pass == 0) {
            multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, dout_tile, values, value_places);
            store_part(gradients, gradient_parts, simdgroup, lane);
          }
        }
        // Wait until all parts are written.
        threadgroup_barrier(mem_flags::mem_threadgroup);
      } else {
        // Keeps the SIMD groups at one block, as in flash_fwd_tensor.metal. It orders no memory.
        threadgroup_barrier(mem_flags::mem_none);
      }
      if (!seen || (pass > 0 && !second_pass)) { continue; }
      ScoreTile slopes;
      if (COLUMNS_SPLIT) {
        add_other_part(scores, score_parts, simdgroup, lane);
      } else {
        multiply_transposed<ELEMENT, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
      }
      rules.value_and_slope(scores, slopes, block, blocks.masked, inputs, problem);
      queries.hide_unseen(scores, slopes, block, column);
      if (pass == 0) {
        if (COLUMNS_SPLIT) {
          add_other_part(gradients, gradient_parts, simdgroup, lane);
        } else {
          multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, dout_tile, values, value_places);
        }
        dropout.apply(gradients, dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(
                                     queries.first_query, block + column));
      } else {
        gradients.fill(0.0f);
      }
      rows.differentiate(gradients, scores);
      if (SCORE_DERIVATIVES) { gradients.multiply(slopes); }
      round_to_cut(gradients);
      accumulate<ELEMENT, HEAD_DIM_QK, OWN_DQ_COLUMNS, DQ_SLICES * DQ_SLICE>(
          dq_tile, gradients, keys, key_places, queries.place.slice * DQ_SLICE + first_dq, column);
    }
    if (!EXACT_DELTA || pass > 0) { break; }
    second_pass = rows.check_delta(queries, inputs, column);
    if (!any_simdgroup(second_pass, votes, simdgroup, lane)) { break; }
  }
  // MLX and PyTorch also have a barrier before they read the results of tensor operations.
  threadgroup_barrier(mem_flags::mem_none);
  rows.write(dq_tile, queries, column + first_dq, problem.softmax_scale);
}
