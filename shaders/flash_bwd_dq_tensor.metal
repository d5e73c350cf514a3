// Attention backward on tensor tiles, the gradient of q: what flash_bwd_dq.metal computes, by Metal
// 4's tensor operations.
//
// As in flash_fwd_tensor.metal, a SIMD group owns 16 queries and nothing is staged. With
// COLUMN_SIMDGROUPS two SIMD groups own the same queries and have half of the columns each.
#define TENSOR_TILES 1

#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "parts.h"
#include "row_sums.h"
#include "tensor_products.h"

// The specialisation: as flash_bwd_dq's, without flex; Q and dout are in registers or read again.
// ELEMENT is float only if TF32 is allowed.
constant constexpr int OWN_QK_COLUMNS = own_spans(HEAD_DIM_QK) * SPAN_COLUMNS;
constant constexpr int OWN_V_COLUMNS = own_spans(HEAD_DIM_V) * SPAN_COLUMNS;
constant constexpr int OWN_DQ_COLUMNS = DQ_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int DQ_SLICES = (HEAD_DIM_QK + DQ_SLICE - 1) / DQ_SLICE;
constant constexpr int SIMDGROUP_ROWS = TENSOR_SIMDGROUP_ROWS;
constant constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
#if EXACT_DELTA
constant constexpr short WALKS = 2;
#else
constant constexpr short WALKS = 1;
#endif

static_assert(BLOCK_K == SPAN_COLUMNS, "a product gives scores of 32 keys");
static_assert(OWN_DQ_COLUMNS % SPAN_COLUMNS == 0, "a slice of dq is whole spans");

using QueryTile = QueryRows<ELEMENT, Queries, HEAD_DIM_QK, ROWS_IN_REGISTERS>;
using GradientTile = QueryRows<ELEMENT, OutGradients, HEAD_DIM_V, ROWS_IN_REGISTERS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dq_tensor(
    FLASH_PARAMETERS const device ELEMENT* dout [[buffer(FLASH_BWD_DOUT)]],
    const device float* lse [[buffer(FLASH_BWD_LSE)]],
    const device float* delta [[buffer(FLASH_BWD_DELTA)]],
#if EXACT_DELTA
    device float* exact_delta [[buffer(FLASH_BWD_EXACT_DELTA)]],
#if DLSE
    const device float* dlse [[buffer(FLASH_BWD_DLSE)]],
#endif
#if NORMALISED
    device float* normalisers [[buffer(FLASH_BWD_NORMALISERS)]],
#endif
#endif
    device ELEMENT* dq [[buffer(FLASH_BWD_DQ)]],
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
#if EXACT_DELTA
  threadgroup float walks_again[SIMDGROUPS];  // 1 where a SIMD group needs the second walk
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  const int batch = threadgroup_position.z;
  GridPlace place;
  place.reset(threadgroup_position, threadgroups);
  const int head = place.column / DQ_SLICES;
  const int slice = place.column % DQ_SLICES;
  const int kv_head = head / problem.queries_per_kv;
#if BAND
  // Later queries may see more keys: start the longest rows first.
  const int q_block = threadgroups.x - 1 - place.tile;
#else
  const int q_block = place.tile;
#endif

  const Sequence sequence = inputs.sequence(batch, problem);
  Output<ELEMENT, HEAD_DIM_QK, DQ_SLICE> dq_rows;
  dq_rows.reset(dq, params.dq_strides, batch, head, sequence.q_start, slice);
#if EXACT_DELTA
  Output<float, 1, 1> exact_rows;
  exact_rows.reset(exact_delta, params.lse_strides, batch, head, sequence.q_start, 0);
#if NORMALISED
  Output<float, 1, 1> normaliser_rows;
  normaliser_rows.reset(normalisers, params.lse_strides, batch, head, sequence.q_start, 0);
#endif
#endif
#if VARLEN || SEQUSED_K || LEFTPAD_K
  if (sequence.impossible || batch == problem.batch) {
    const float value = sequence.impossible ? NAN : 0.0f;
    const int first = place.tile * THREADS + thread_index;
    const int step = threadgroups.x * THREADS;
    dq_rows.fill(value, first, sequence.q_length, step);
#if EXACT_DELTA
    exact_rows.fill(value, first, slice == 0 ? sequence.q_length : 0, step);
#if NORMALISED
    normaliser_rows.fill(1.0f, first, slice == 0 ? sequence.q_length : 0, step);
#endif
#endif
    return;
  }
#endif

  const ushort row = fragment_row(lane);
  const ushort column = tensor_column(lane);
  const int last_query = sequence.q_length - 1;
  const int tile_query = q_block * BLOCK_Q;
#if VARLEN
  if (tile_query > last_query) {
    return;
  }
#endif
  const int simdgroup_query = tile_query + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int part = simdgroup % COLUMN_SIMDGROUPS;
  const int first_dq = part * OWN_DQ_COLUMNS;
  const int lane_query = simdgroup_query + row;

  Visibility visible;
  visible.reset(sequence, problem);
  // What any query of the SIMD group sees, and what all of them see.
  const Range of_first = visible.keys_of(simdgroup_query);
  const Range of_last = visible.keys_of(min(simdgroup_query + SIMDGROUP_ROWS - 1, last_query));
  const int seen_begin = of_first.begin;
  const int seen_end = simdgroup_query > last_query ? 0 : of_last.end;

  const Keys keys = inputs.keys(batch, kv_head, sequence, problem);
  const Values values = inputs.values(batch, kv_head, sequence, problem);
  OutGradients out_gradients;
  out_gradients.rows = first_row(dout, params.dout_strides, batch, head, sequence.q_start);
  out_gradients.row_stride = params.dout_strides.row;
  Rules<TENSOR_ROWS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);
#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
#endif

  QueryTile q_tile;        // [16, own columns of D]
  GradientTile dout_tile;  // [16, own columns of Dv]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query,
              column + part * OWN_QK_COLUMNS);
  dout_tile.load(out_gradients, lane_query, last_query, column + part * OWN_V_COLUMNS);
  float origins[TENSOR_ROWS];
  float deltas[TENSOR_ROWS];
  const int64_t statistics =
      batch * params.lse_strides.batch + head * params.lse_strides.head + sequence.q_start;
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    const int query = min(lane_query + i * FRAGMENT, last_query);
    origins[i] = weight_origin(lse[statistics + query]);
    deltas[i] = delta[statistics + query];
  }
  RegisterTile<float, TENSOR_ROWS, OWN_DQ_COLUMNS / FRAGMENT> dq_tile;  // [16, own of DQ_SLICE]
  dq_tile.fill(0.0f);

  // Blocks begin at multiples of BLOCK_K, the first of them at the first key that the tile sees.
  const int kv_begin = visible.keys_of(tile_query).begin / BLOCK_K * BLOCK_K;
  const int kv_end = visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end;
#if EXACT_DELTA
  RowSums sums[TENSOR_ROWS];
  float row_factors[TENSOR_ROWS];  // of the weights, in the end
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    sums[i].reset();
    row_factors[i] = 1.0f;
  }
#endif
#if BLOCK_LISTS
  ListedBlocks<LIST_KV_BLOCK> listed;
  listed.reset(inputs, problem.flex, batch, head, tile_query / LIST_Q_BLOCK, kv_end);
#endif
  bool again = false;
  for (short walk = 0; walk < WALKS; walk++) {
#if BLOCK_LISTS
    for (int kv_block = listed.first(); !listed.done; kv_block = listed.next(kv_block + BLOCK_K)) {
#else
    for (int kv_block = kv_begin; kv_block < kv_end; kv_block += BLOCK_K) {
#endif
      const bool unseen = kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin;
      KeyPlaces<Keys> key_places;
      key_places.find(keys, kv_block, sequence.first_key, sequence.kv_length, row);
      KeyPlaces<Values> value_places;
      value_places.find(values, kv_block, sequence.first_key, sequence.kv_length, row);
      BlockTile scores;     // [16, BLOCK_K]
      BlockTile gradients;  // d loss / d weight, then d loss / d score: the same
#if COLUMN_SIMDGROUPS > 1
      // Both have read the parts of the block before.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (!unseen) {
        multiply_transposed<ELEMENT, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
        leave_part(scores, score_parts, simdgroup, lane);
        if (walk == 0) {
          multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, dout_tile, values, value_places);
          leave_part(gradients, gradient_parts, simdgroup, lane);
        }
      }
      // The parts are there.
      threadgroup_barrier(mem_flags::mem_threadgroup);
#else
      // Holds the SIMD groups together, as in flash_fwd_tensor.metal. It orders no memory.
      threadgroup_barrier(mem_flags::mem_none);
#endif
      if (unseen || (walk > 0 && !again)) {
        continue;
      }
#if COLUMN_SIMDGROUPS > 1
      add_other_part(scores, score_parts, simdgroup, lane);
#else
      multiply_transposed<ELEMENT, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
#endif
      BlockTile slopes;
      rules.value_and_slope(scores, slopes, kv_block, BLOCK_MASKED, inputs, problem);
      if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
        visible.apply<false>(scores, lane_query, kv_block + column);
      }

      if (walk == 0) {
#if COLUMN_SIMDGROUPS > 1
        add_other_part(gradients, gradient_parts, simdgroup, lane);
#else
        multiply_transposed<ELEMENT, HEAD_DIM_V>(gradients, dout_tile, values, value_places);
#endif
#if DROPOUT
        dropout.apply(gradients, dropout.kept<false, TENSOR_ROWS, SPAN_FRAGMENTS>(
                                     lane_query, kv_block + column));
#endif
      } else {
        gradients.fill(0.0f);
      }
      UNROLL
      for (short i = 0; i < TENSOR_ROWS; i++) {
        Fragment<float> block_weights = Fragment<float>(0.0f, 0.0f);
        UNROLL
        for (short j = 0; j < SPAN_FRAGMENTS; j++) {
          const Fragment<float> weight = fast::exp2(scores.fragments[i][j] - origins[i]);
          gradients.fragments[i][j] = weight * (gradients.fragments[i][j] - deltas[i]);
#if NORMALISED
          block_weights += weight;
#endif
        }
#if EXACT_DELTA
        sums[i].add<SPAN_FRAGMENTS>(gradients.fragments[i], block_weights);
#endif
      }
#if SOFTCAP
      gradients.multiply(slopes);
#endif
      round_to_cut(gradients);
      accumulate<ELEMENT, HEAD_DIM_QK, OWN_DQ_COLUMNS, DQ_SLICES * DQ_SLICE>(
          dq_tile, gradients, keys, key_places, slice * DQ_SLICE + first_dq, column);
    }
#if EXACT_DELTA
    if (walk > 0) {
      break;
    }
    // From here on `deltas` holds what the second walk subtracts.
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      const int query = min(lane_query + i * FRAGMENT, last_query);
#if SINK
      const float sink = float(inputs.learnable_sink[head]);
#else
      const float sink = 0.0f;
#endif
#if DLSE
      const float row_dlse =
          dlse[batch * params.dlse_strides.batch + head * params.dlse_strides.head +
               (sequence.q_start + query) * params.dlse_strides.row];
#else
      const float row_dlse = 0.0f;
#endif
      const RowError error =
          sums[i].merge_lanes(lse[statistics + query], origins[i], deltas[i], sink, row_dlse);
      row_factors[i] = error.factor;
      again = again || fabs(error.of_delta) > TOLERATED * sums[i].sizes;
      if (slice == 0 && part == 0 && column == 0 && lane_query + i * FRAGMENT <= last_query) {
        exact_rows.store(query, 0, Fragment<float>(deltas[i] + error.of_delta, 0.0f));
#if NORMALISED
        normaliser_rows.store(query, 0, Fragment<float>(error.normaliser, 0.0f));
#endif
      }
      deltas[i] = error.of_delta;
    }
    again = simd_max(again ? 1.0f : 0.0f) > 0.0f;
    if (lane == 0) {
      walks_again[simdgroup] = again ? 1.0f : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float any_again = 0.0f;
    UNROLL
    for (short i = 0; i < SIMDGROUPS; i++) {
      any_again = max(any_again, walks_again[i]);
    }
    if (any_again == 0.0f) {
      break;
    }
#endif
  }
  // As in MLX and PyTorch, before the results of tensor operations are read.
  threadgroup_barrier(mem_flags::mem_none);

  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    const int query = lane_query + i * FRAGMENT;
    if (query > last_query) {
      continue;
    }
#if NORMALISED
    const float scale = problem.softmax_scale * row_factors[i];
#else
    const float scale = problem.softmax_scale;
#endif
    UNROLL
    for (short d = 0; d < OWN_DQ_COLUMNS / FRAGMENT; d++) {
      dq_rows.store(query, column + first_dq + column_offset(d), dq_tile.fragments[i][d] * scale);
    }
  }
}
