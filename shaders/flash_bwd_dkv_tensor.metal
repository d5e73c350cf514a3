// The gradients of k and v on tensor tiles: flash_bwd_dkv.metal with Metal 4's tensor operations.
//
// As in flash_bwd_dkv.metal, a row is a key and a column is a query, so that no left operand has to
// be transposed. As in flash_fwd_tensor.metal, a SIMD group owns 16 rows and nothing is staged.
// With COLUMN_SIMDGROUPS two SIMD groups own the same keys and half of the columns each: dk and dv
// of 128 columns would take too many registers.
#define TENSOR_TILES 1

#include "dkv.h"
#include "tensor_products.h"

// The host defines what flash_bwd_dkv needs, without flex. Without ROWS_IN_REGISTERS, k and v are
// read again for each block. ELEMENT is float only if TF32 is allowed.
constant constexpr int OWN_QK_COLUMNS = own_spans(HEAD_DIM_QK) * SPAN_COLUMNS;
constant constexpr int OWN_V_COLUMNS = own_spans(HEAD_DIM_V) * SPAN_COLUMNS;

static_assert(BLOCK_Q == SPAN_COLUMNS, "a product gives scores of 32 queries");
static_assert(SIMDGROUP_ROWS == TENSOR_SIMDGROUP_ROWS, "a product gives scores of 16 keys");
static_assert(OWN_DK_COLUMNS % SPAN_COLUMNS == 0, "a slice of dk is whole spans");
static_assert(OWN_DV_COLUMNS % SPAN_COLUMNS == 0, "a slice of dv is whole spans");

using KeyTile = QueryRows<ELEMENT, Keys, HEAD_DIM_QK, ROWS_IN_REGISTERS>;
using ValueTile = QueryRows<ELEMENT, Values, HEAD_DIM_V, ROWS_IN_REGISTERS>;

// The statistics of a block's queries. Each lane reads the statistics of one query. Shuffles return
// the statistics of the queries in its columns.
struct BlockStatistics {
  float own_lse_log2;
  float own_delta;
  float own_weight_factor;  // NORMALISED
  ushort column;

  METAL_FUNC void load(thread const QueryStatistics& statistics, int block, int q_length,
                       ushort lane) thread {
    const int query = min(block + int(lane), q_length - 1);
    own_lse_log2 = statistics.lse_log2(query);
    own_delta = statistics.delta_of(query);
    if (NORMALISED) { own_weight_factor = statistics.weight_factor(query); }
  }

  METAL_FUNC Fragment<float> lse_log2(short j) const thread {
    return columns_of(own_lse_log2, column + column_offset(j));
  }

  METAL_FUNC Fragment<float> delta(short j) const thread {
    return columns_of(own_delta, column + column_offset(j));
  }

  METAL_FUNC Fragment<float> weight_factor(short j) const thread {
    return columns_of(own_weight_factor, column + column_offset(j));
  }
};

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dkv_tensor(
    FLASH_BWD_PARAMETERS device Result* dk [[buffer(FLASH_BWD_DK)]],
    device Result* dv [[buffer(FLASH_BWD_DV)]], GRID_PARAMS(FlashBwdParams, FLASH_PARAMS),
    GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashBwdParams)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, score_parts, TENSOR_FRAGMENTS * THREADS)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, gradient_parts, TENSOR_FRAGMENTS * THREADS)

  FLASH_BWD_SET_INPUTS

  DkvKeys keys;
  if (!keys.begin(inputs, dk, dv, params, threadgroup_position, threadgroups, thread_index,
                  simdgroup)) {
    return;
  }
  const int batch = keys.batch;
  const Sequence sequence = keys.sequence;
  const ushort row = fragment_row(lane);
  const ushort column = lane_column(lane);
  const int lane_key = keys.first_key + row;
  const int first_dk = keys.slice * DK_SLICE + keys.part * OWN_DK_COLUMNS;
  const int first_dv = keys.slice * DV_SLICE + keys.part * OWN_DV_COLUMNS;

  KeyTile k_tile;    // [16, own columns of D]
  ValueTile v_tile;  // [16, own columns of Dv]
  if (keys.has_keys) {
    k_tile.load(inputs.keys(batch, keys.kv_head, sequence, problem), lane_key, keys.last(),
                column + keys.part * OWN_QK_COLUMNS);
    v_tile.load(inputs.values(batch, keys.kv_head, sequence, problem), lane_key, keys.last(),
                column + keys.part * OWN_V_COLUMNS);
  }
  DkTile dk_tile;
  DvTile dv_tile;
  dk_tile.fill(0.0f);
  dv_tile.fill(0.0f);
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  BlockStatistics block_statistics;
  block_statistics.column = column;
  const Range query_range = keys.queries();

  // HEAD_SPLITS divides the query heads.
  const int members = problem.queries_per_kv / HEAD_SPLITS;
  for (int member = 0; member < members; member++) {
    const int head = keys.kv_head * problem.queries_per_kv + keys.split * members + member;
    const Queries queries = inputs.queries(batch, head, sequence, problem);
    const OutGradients out_gradients =
        buffers.out_gradients(params.dout_strides, batch, head, sequence);
    const QueryStatistics statistics =
        buffers.statistics(params.lse_strides, batch, head, sequence);
    Rules<ROW_FRAGMENTS, true> rules;
    rules.reset(inputs, batch, head, lane_key, column, keys.visible, sequence, problem);
    dropout.move_to(batch, head);
    Blocks<LIST_Q_BLOCK> blocks;
    blocks.reset(inputs, problem.flex, batch, head, keys.tile_key / LIST_KV_BLOCK, query_range);

    for (int block = blocks.first(); !blocks.done; block = blocks.next(block + BLOCK_Q)) {
      const bool seen = keys.seen.any_in(block, BLOCK_Q);
      KeyPlaces<Queries> q_places;
      q_places.find(queries, block, 0, sequence.q_length, row);
      KeyPlaces<OutGradients> dout_places;
      dout_places.find(out_gradients, block, 0, sequence.q_length, row);
      BlockTile weights;    // scores, then weights: [keys, queries]
      BlockTile gradients;  // d loss / d weight, then d loss / d score
      if (COLUMNS_SPLIT) {
        // Wait until both SIMD groups have read the previous parts.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (seen) {
          multiply_transposed<ELEMENT, HEAD_DIM_QK>(weights, k_tile, queries, q_places);
          store_part(weights, score_parts, simdgroup, lane);
          multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, v_tile, out_gradients, dout_places);
          store_part(gradients, gradient_parts, simdgroup, lane);
        }
        // Wait until all parts are written.
        threadgroup_barrier(mem_flags::mem_threadgroup);
      } else {
        // Keeps the SIMD groups at one block, as in flash_fwd_tensor.metal. It orders no memory.
        threadgroup_barrier(mem_flags::mem_none);
      }
      if (!seen) { continue; }
      const int lane_query = block + column;
      BlockTile slopes;
      if (COLUMNS_SPLIT) {
        add_other_part(weights, score_parts, simdgroup, lane);
        add_other_part(gradients, gradient_parts, simdgroup, lane);
      } else {
        multiply_transposed<ELEMENT, HEAD_DIM_QK>(weights, k_tile, queries, q_places);
      }
      rules.value_and_slope(weights, slopes, block, blocks.masked, inputs, problem);
      keys.hide_unseen(weights, slopes, block, lane_key, lane_query);
      block_statistics.load(statistics, block, sequence.q_length, lane);
      exponentiate(weights, block_statistics);
      if (!COLUMNS_SPLIT) {
        multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, v_tile, out_gradients, dout_places);
      }
      const uint kept = dropout.kept<true, TENSOR_ROWS, SPAN_FRAGMENTS>(lane_key, lane_query);
      dropout.apply(gradients, kept);
      differentiate(gradients, weights, block_statistics);
      if (SCORE_DERIVATIVES) { gradients.multiply(slopes); }
      dropout.apply(weights, kept);
      round_to_cut(weights);
      accumulate<ELEMENT, HEAD_DIM_V, OWN_DV_COLUMNS, SLICES * DV_SLICE>(
          dv_tile, weights, out_gradients, dout_places, first_dv, column);
      round_to_cut(gradients);
      accumulate<ELEMENT, HEAD_DIM_QK, OWN_DK_COLUMNS, SLICES * DK_SLICE>(
          dk_tile, gradients, queries, q_places, first_dk, column);
    }
  }
  // MLX and PyTorch also have a barrier before they read the results of tensor operations.
  threadgroup_barrier(mem_flags::mem_none);
  keys.write(dk_tile, dv_tile, row, column, problem);
}
