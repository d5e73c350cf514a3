// Attention backward on tensor tiles, the gradients of k and v: what flash_bwd_dkv.metal computes,
// by Metal 4's tensor operations.
//
// As in flash_bwd_dkv.metal a row is a key and a column a query, so transposed weights are what
// products give, and no left operand is transposed. As in flash_fwd_tensor.metal, a SIMD group owns
// 16 rows and nothing is staged. With COLUMN_SIMDGROUPS two SIMD groups own the same keys and have
// half of the columns each: dk and dv of 128 columns would not leave a thread registers enough.
// HEAD_SPLITS threadgroups may share the query heads of a KV head, as there.
#define TENSOR_TILES 1

#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "head_splits.h"
#include "output.h"
#include "parts.h"
#include "tensor_products.h"

// The specialisation: as flash_bwd_dkv's, without flex; K and V are in registers or read again.
// ELEMENT is float only if TF32 is allowed.
constant constexpr int OWN_QK_COLUMNS = own_spans(HEAD_DIM_QK) * SPAN_COLUMNS;
constant constexpr int OWN_V_COLUMNS = own_spans(HEAD_DIM_V) * SPAN_COLUMNS;
constant constexpr int OWN_DK_COLUMNS = DK_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int OWN_DV_COLUMNS = DV_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int SIMDGROUP_ROWS = TENSOR_SIMDGROUP_ROWS;
constant constexpr int BLOCK_K = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

static_assert(BLOCK_Q == SPAN_COLUMNS, "a product gives scores of 32 queries");
static_assert(OWN_DK_COLUMNS % SPAN_COLUMNS == 0, "a slice of dk is whole spans");
static_assert(OWN_DV_COLUMNS % SPAN_COLUMNS == 0, "a slice of dv is whole spans");

using KeyTile = QueryRows<ELEMENT, Keys, HEAD_DIM_QK, ROWS_IN_REGISTERS>;
using ValueTile = QueryRows<ELEMENT, Values, HEAD_DIM_V, ROWS_IN_REGISTERS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dkv_tensor(
    FLASH_PARAMETERS const device ELEMENT* dout [[buffer(FLASH_BWD_DOUT)]],
    const device float* lse [[buffer(FLASH_BWD_LSE)]],
    const device float* delta [[buffer(FLASH_BWD_DELTA)]],
#if NORMALISED
    const device float* normalisers [[buffer(FLASH_BWD_NORMALISERS)]],
#endif
    device Result* dk [[buffer(FLASH_BWD_DK)]], device Result* dv [[buffer(FLASH_BWD_DV)]],
    constant FlashBwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
#if COLUMN_SIMDGROUPS > 1
  threadgroup Fragment<float> score_parts[TENSOR_FRAGMENTS * THREADS];
  threadgroup Fragment<float> gradient_parts[TENSOR_FRAGMENTS * THREADS];
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  const int batch = threadgroup_position.z;
  GridPlace place;
  place.reset(threadgroup_position, threadgroups);
  const int split = place.column % HEAD_SPLITS;
  const int kv_head = place.column / HEAD_SPLITS / SLICES;
  const int slice = place.column / HEAD_SPLITS % SLICES;

  const Sequence sequence = inputs.sequence(batch, problem);
  Output<Result, HEAD_DIM_QK, DK_SLICE, SLICES> dk_rows;
  dk_rows.reset(dk + split * params.dk_split_stride, params.dk_strides, batch, kv_head,
                sequence.kv_start, slice);
  Output<Result, HEAD_DIM_V, DV_SLICE, SLICES> dv_rows;
  dv_rows.reset(dv + split * params.dv_split_stride, params.dv_strides, batch, kv_head,
                sequence.kv_start, slice);
  // Every row of dk and dv is written, also those that the sequence does not use.
  const int rows = sequence.kv_rows;
#if VARLEN || SEQUSED_K || LEFTPAD_K
  if (sequence.impossible || batch == problem.batch) {
    const float value = sequence.impossible ? NAN : 0.0f;
    const int first = place.tile * THREADS + thread_index;
    dk_rows.fill(value, first, rows, threadgroups.x * THREADS);
    dv_rows.fill(value, first, rows, threadgroups.x * THREADS);
    return;
  }
#endif

  const ushort row = fragment_row(lane);
  const ushort column = tensor_column(lane);
  const int last_key = sequence.kv_length - 1;
  const int tile_key = place.tile * BLOCK_K;
#if VARLEN
  if (tile_key >= rows) {
    return;
  }
#endif
  const int simdgroup_key = tile_key + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int part = simdgroup % COLUMN_SIMDGROUPS;
  const int first_dk = part * OWN_DK_COLUMNS;
  const int first_dv = part * OWN_DV_COLUMNS;
  const int lane_key = simdgroup_key + row;

  Visibility visible;
  visible.reset(sequence, problem);
  // The queries that see any of the threadgroup's keys, any of the SIMD group's, and all of those.
  const int first_key = sequence.first_key;
  const bool has_keys = tile_key <= last_key && tile_key + BLOCK_K > first_key;
  const int tile_begin = visible.queries_of(max(tile_key, first_key)).begin;
  const int tile_end = has_keys ? visible.queries_of(min(tile_key + BLOCK_K - 1, last_key)).end : 0;
  const Range of_first = visible.queries_of(simdgroup_key);
  const Range of_last = visible.queries_of(simdgroup_key + SIMDGROUP_ROWS - 1);
  const int seen_begin = visible.queries_of(max(simdgroup_key, first_key)).begin;
  const int seen_end =
      simdgroup_key > last_key || simdgroup_key + SIMDGROUP_ROWS <= first_key
          ? 0
          : visible.queries_of(min(simdgroup_key + SIMDGROUP_ROWS - 1, last_key)).end;

  KeyTile k_tile;    // [16, own columns of D]
  ValueTile v_tile;  // [16, own columns of Dv]
  if (has_keys) {
    k_tile.load(inputs.keys(batch, kv_head, sequence, problem), lane_key, last_key,
                column + part * OWN_QK_COLUMNS);
    v_tile.load(inputs.values(batch, kv_head, sequence, problem), lane_key, last_key,
                column + part * OWN_V_COLUMNS);
  }
  RegisterTile<float, TENSOR_ROWS, OWN_DK_COLUMNS / FRAGMENT> dk_tile;  // [16, own of DK_SLICE]
  RegisterTile<float, TENSOR_ROWS, OWN_DV_COLUMNS / FRAGMENT> dv_tile;  // [16, own of DV_SLICE]
  dk_tile.fill(0.0f);
  dv_tile.fill(0.0f);
#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
#endif

  // HEAD_SPLITS divides the query heads.
  const int members = problem.queries_per_kv / HEAD_SPLITS;
  for (int member = 0; member < members; member++) {
    const int head = kv_head * problem.queries_per_kv + split * members + member;
    const Queries queries = inputs.queries(batch, head, sequence, problem);
    OutGradients out_gradients;
    out_gradients.rows = first_row(dout, params.dout_strides, batch, head, sequence.q_start);
    out_gradients.row_stride = params.dout_strides.row;
    const int64_t statistics =
        batch * params.lse_strides.batch + head * params.lse_strides.head + sequence.q_start;
    Rules<TENSOR_ROWS, true> rules;
    rules.reset(inputs, batch, head, lane_key, column, visible, sequence, problem);
#if DROPOUT
    dropout.move_to(batch, head);
#endif

    // Blocks begin at multiples of BLOCK_Q, the first of them at the first query that sees these
    // keys.
    const int q_begin = tile_begin / BLOCK_Q * BLOCK_Q;
#if BLOCK_LISTS
    ListedBlocks<LIST_Q_BLOCK> listed;
    listed.reset(inputs, problem.flex, batch, head, tile_key / LIST_KV_BLOCK, sequence.q_length);
    for (int q_block = listed.first(); !listed.done; q_block = listed.next(q_block + BLOCK_Q)) {
#else
    for (int q_block = q_begin; q_block < tile_end; q_block += BLOCK_Q) {
#endif
      const bool unseen = q_block >= seen_end || q_block + BLOCK_Q <= seen_begin;
      KeyPlaces<Queries> q_places;
      q_places.find(queries, q_block, 0, sequence.q_length, row);
      KeyPlaces<OutGradients> dout_places;
      dout_places.find(out_gradients, q_block, 0, sequence.q_length, row);
      BlockTile weights;    // scores, then weights: [16, BLOCK_Q]
      BlockTile gradients;  // d loss / d weight, then d loss / d score: the same
#if COLUMN_SIMDGROUPS > 1
      // Both have read the parts of the block before.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (!unseen) {
        multiply_transposed<ELEMENT, HEAD_DIM_QK>(weights, k_tile, queries, q_places);
        leave_part(weights, score_parts, simdgroup, lane);
        multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, v_tile, out_gradients, dout_places);
        leave_part(gradients, gradient_parts, simdgroup, lane);
      }
      // The parts are there.
      threadgroup_barrier(mem_flags::mem_threadgroup);
#else
      // Holds the SIMD groups together, as in flash_fwd_tensor.metal. It orders no memory.
      threadgroup_barrier(mem_flags::mem_none);
#endif
      if (unseen) {
        continue;
      }
#if COLUMN_SIMDGROUPS > 1
      add_other_part(weights, score_parts, simdgroup, lane);
      add_other_part(gradients, gradient_parts, simdgroup, lane);
#else
      multiply_transposed<ELEMENT, HEAD_DIM_QK>(weights, k_tile, queries, q_places);
#endif
      BlockTile slopes;
      rules.value_and_slope(weights, slopes, q_block, BLOCK_MASKED, inputs, problem);
      if (q_block < of_last.begin || q_block + BLOCK_Q > of_first.end) {
        visible.apply<true>(weights, lane_key, q_block + column);
      }
      // Each lane reads one query's statistics, and gets those of its columns from others.
      const int query = min(q_block + int(lane), sequence.q_length - 1);
      const float origin_of_query = weight_origin(lse[statistics + query]);
      const float delta_of_query = delta[statistics + query];
#if NORMALISED
      const float factor_of_query =
          weight_factor(normalisers[statistics + query], lse[statistics + query]);
#endif
      UNROLL
      for (short j = 0; j < SPAN_FRAGMENTS; j++) {
        const Fragment<float> origin = columns_of(origin_of_query, column + column_offset(j));
        UNROLL
        for (short i = 0; i < TENSOR_ROWS; i++) {
          weights.fragments[i][j] = fast::exp2(weights.fragments[i][j] - origin);
        }
#if NORMALISED
        const Fragment<float> factor = columns_of(factor_of_query, column + column_offset(j));
        UNROLL
        for (short i = 0; i < TENSOR_ROWS; i++) {
          weights.fragments[i][j] *= factor;
        }
#endif
      }
#if COLUMN_SIMDGROUPS == 1
      multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, v_tile, out_gradients, dout_places);
#endif
#if DROPOUT
      const uint kept = dropout.kept<true, TENSOR_ROWS, SPAN_FRAGMENTS>(lane_key, q_block + column);
      dropout.apply(gradients, kept);
#endif
      UNROLL
      for (short j = 0; j < SPAN_FRAGMENTS; j++) {
        const Fragment<float> row_delta = columns_of(delta_of_query, column + column_offset(j));
        UNROLL
        for (short i = 0; i < TENSOR_ROWS; i++) {
          gradients.fragments[i][j] =
              weights.fragments[i][j] * (gradients.fragments[i][j] - row_delta);
        }
      }
#if SOFTCAP
      gradients.multiply(slopes);
#endif
#if DROPOUT
      dropout.apply(weights, kept);
#endif
      round_to_cut(weights);
      accumulate<ELEMENT, HEAD_DIM_V, OWN_DV_COLUMNS, SLICES * DV_SLICE>(
          dv_tile, weights, out_gradients, dout_places, slice * DV_SLICE + first_dv, column);
      round_to_cut(gradients);
      accumulate<ELEMENT, HEAD_DIM_QK, OWN_DK_COLUMNS, SLICES * DK_SLICE>(
          dk_tile, gradients, queries, q_places, slice * DK_SLICE + first_dk, column);
    }
  }
  // As in MLX and PyTorch, before the results of tensor operations are read.
  threadgroup_barrier(mem_flags::mem_none);

  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    const int key = lane_key + i * FRAGMENT;
    if (key >= rows) {
      continue;
    }
    // Keys that do not exist have no gradient, whatever their memory holds.
    const bool exists = key >= first_key && key <= last_key;
    UNROLL
    for (short d = 0; d < OWN_DK_COLUMNS / FRAGMENT; d++) {
      dk_rows.store(
          key, column + first_dk + column_offset(d),
          exists ? dk_tile.fragments[i][d] * problem.softmax_scale : Fragment<float>(0.0f, 0.0f));
    }
    UNROLL
    for (short d = 0; d < OWN_DV_COLUMNS / FRAGMENT; d++) {
      dv_rows.store(key, column + first_dv + column_offset(d),
                    exists ? dv_tile.fragments[i][d] : Fragment<float>(0.0f, 0.0f));
    }
  }
}
