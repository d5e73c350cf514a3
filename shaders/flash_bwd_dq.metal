// Attention backward, the gradient of q: dq = scale * (weights * (dout v^T - delta)) k.
//
// Dao, "FlashAttention-2" (2023), algorithm 2, with the loops the other way round: a threadgroup
// owns BLOCK_Q queries and walks over the keys, so that no other threadgroup writes its rows.
//
// delta is rowsum(dout * out), and out is rounded. With EXACT_DELTA the walk also sums the
// gradients of each row's scores. What that sum must be is known, so the rest is what delta misses;
// where it shows in dq, a second walk subtracts it.
//
// The log-sum-exp is rounded too, which shows in float32 gradients where scores are large. With
// NORMALISED the sum of exp(score - log-sum-exp) is taken, whose inverse makes the weights exact.
#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "own_rows.h"
#include "row_sums.h"

// The specialisation: as flash_fwd's, with DQ_SLICE, the columns of dq that a threadgroup owns, and
// ROWS_IN_REGISTERS for q and dout alike; EXACT_DELTA, and with it NORMALISED, and DLSE if the
// log-sum-exp has a gradient. With FLEX also FLEX_SLOPE.
constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_FRAGMENTS = fragments(HEAD_DIM_V);
constant constexpr int V_COLUMNS = V_FRAGMENTS * FRAGMENT;
constant constexpr int DQ_SLICES = (HEAD_DIM_QK + DQ_SLICE - 1) / DQ_SLICE;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
// A SIMD group's share of the columns.
constant constexpr int OWN_QK_COLUMNS = QK_COLUMNS / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_COLUMNS = V_COLUMNS / COLUMN_SIMDGROUPS;
constant constexpr int OWN_DQ_COLUMNS = DQ_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_PAIRS_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT);
constant constexpr int V_PAIRS_BYTES = BLOCK_K * padded(V_COLUMNS) * sizeof(ELEMENT);
#if EXACT_DELTA
constant constexpr short WALKS = 2;
constant constexpr int SHARED_BYTES = SIMDGROUPS * sizeof(float);
#else
constant constexpr short WALKS = 1;
constant constexpr int SHARED_BYTES = 0;
#endif

static_assert(K_PAIRS_BYTES + V_PAIRS_BYTES + SHARED_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using QueryTile = OwnRows<Queries, OWN_QK_COLUMNS>;
using GradientTile = OwnRows<OutGradients, OWN_V_COLUMNS>;

constant constexpr int PARTS = SIMDGROUPS * ROW_FRAGMENTS * KEY_FRAGMENTS * SIMD_LANES;
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dq(
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
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, Dv] pairs of keys
#if ROWS_IN_THREADGROUP
  threadgroup uint4 q_chunks[SIMDGROUPS * QueryTile::SIZE];
  threadgroup uint4 dout_chunks[SIMDGROUPS * GradientTile::SIZE];
#endif
#if COLUMN_SIMDGROUPS > 1
  threadgroup Fragment<float> score_parts[PARTS];
  threadgroup Fragment<float> gradient_parts[PARTS];
#endif
#if EXACT_DELTA
  threadgroup float walks_again[SIMDGROUPS];  // 1 where a SIMD group needs the second walk
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  GridPlace place;
#if FLEX_ORDER
  place.reset_in_order<FLEX_Q_BLOCK / BLOCK_Q, DQ_SLICES>(inputs.block_order, problem.flex,
                                                          threadgroup_position, threadgroups);
#else
  place.reset(threadgroup_position, threadgroups);
#endif
  const int batch = place.batch;
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
    dq_rows.fill(sequence.impossible ? NAN : 0.0f, place.tile * THREADS + thread_index,
                 sequence.q_length, threadgroups.x * THREADS);
#if EXACT_DELTA
    if (slice == 0) {
      exact_rows.fill(sequence.impossible ? NAN : 0.0f, place.tile * THREADS + thread_index,
                      sequence.q_length, threadgroups.x * THREADS);
#if NORMALISED
      normaliser_rows.fill(1.0f, place.tile * THREADS + thread_index, sequence.q_length,
                           threadgroups.x * THREADS);
#endif
    }
#endif
    return;
  }
#endif

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int last_query = sequence.q_length - 1;
  const int tile_query = q_block * BLOCK_Q;
#if VARLEN || FLEX_ORDER
  if (tile_query > last_query) {
    return;
  }
#endif
  const int simdgroup_query = tile_query + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int part = simdgroup % COLUMN_SIMDGROUPS;
  const int first_qk = part * OWN_QK_COLUMNS;
  const int first_v = part * OWN_V_COLUMNS;
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
  Rules<ROW_FRAGMENTS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);

#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
#endif

  const threadgroup Pair* k_pairs_lane =
      lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column) + first_qk;
  const threadgroup Pair* v_pairs_lane =
      lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column) + first_v;
  const auto k_rows_lane =
      lane_of_paired_rows<ELEMENT, QK_COLUMNS, DQ_SLICES * DQ_SLICE == QK_COLUMNS>(
          k_pairs, row, column, slice * DQ_SLICE + first_dq);

  QueryTile q_tile;        // [ROW_FRAGMENTS * 8, D]
  GradientTile dout_tile;  // [ROW_FRAGMENTS * 8, Dv]
#if ROWS_IN_THREADGROUP
  q_tile.keep_in(q_chunks, simdgroup, lane);
  dout_tile.keep_in(dout_chunks, simdgroup, lane);
#endif
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query,
              column + first_qk);
  dout_tile.load(out_gradients, lane_query, last_query, column + first_v);
  float origins[ROW_FRAGMENTS];
  float deltas[ROW_FRAGMENTS];
  const int64_t statistics =
      batch * params.lse_strides.batch + head * params.lse_strides.head + sequence.q_start;
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int query = min(lane_query + i * FRAGMENT, last_query);
    origins[i] = weight_origin(lse[statistics + query]);
    deltas[i] = delta[statistics + query];
  }
  RegisterTile<float, ROW_FRAGMENTS, OWN_DQ_COLUMNS / FRAGMENT> dq_tile;
  dq_tile.fill(0.0f);

  // Blocks begin at multiples of BLOCK_K, the first of them at the first key that the tile sees.
  const int kv_end = visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end;
  const int first_seen = visible.keys_of(tile_query).begin;
  const int kv_begin = first_seen < kv_end ? first_seen / BLOCK_K * BLOCK_K : kv_end;
#if EXACT_DELTA
  RowSums sums[ROW_FRAGMENTS];
  float row_factors[ROW_FRAGMENTS];  // of the weights, in the end
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
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
      // Every SIMD group has read the tiles of the block before.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
          k_pairs, keys, kv_block, sequence.first_key, sequence.kv_length, thread_index);
      if (walk == 0) {
        stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
            v_pairs, values, kv_block, sequence.first_key, sequence.kv_length, thread_index);
      }
      // The tiles are whole.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool unseen = kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin;
      ScoreTile scores;     // [ROW_FRAGMENTS * 8, BLOCK_K]
      ScoreTile gradients;  // d loss / d weight, then d loss / d score: the same
#if COLUMN_SIMDGROUPS > 1
      if (!unseen) {
        multiply_transposed<ELEMENT, QK_COLUMNS, OWN_QK_COLUMNS>(scores, q_tile, k_pairs_lane);
        leave_part(scores, score_parts, simdgroup, lane);
        if (walk == 0) {
          multiply_transposed<ELEMENT, V_COLUMNS, OWN_V_COLUMNS>(gradients, dout_tile,
                                                                 v_pairs_lane);
          leave_part(gradients, gradient_parts, simdgroup, lane);
        }
      }
      // The parts are there.
      threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
      if (unseen || (walk > 0 && !again)) {
        continue;
      }
      ScoreTile slopes;
#if COLUMN_SIMDGROUPS > 1
      add_other_part(scores, score_parts, simdgroup, lane);
#else
      multiply_transposed<ELEMENT, QK_COLUMNS>(scores, q_tile, k_pairs_lane);
#endif
      rules.value_and_slope(scores, slopes, kv_block, BLOCK_MASKED, inputs, problem);
      if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
        visible.apply<false>(scores, lane_query, kv_block + column);
#ifdef FLEX_SLOPE
        // It may be infinite at the score 0 of keys that do not exist.
        visible.apply<false>(slopes, lane_query, kv_block + column, 0.0f);
#endif
      }

      if (walk == 0) {
#if COLUMN_SIMDGROUPS > 1
        add_other_part(gradients, gradient_parts, simdgroup, lane);
#else
        multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_pairs_lane);
#endif
#if DROPOUT
        dropout.apply(gradients, dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(
                                     lane_query, kv_block + column));
#endif
      } else {
        gradients.fill(0.0f);
      }
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        Fragment<float> block_weights = Fragment<float>(0.0f, 0.0f);
        UNROLL
        for (short j = 0; j < KEY_FRAGMENTS; j++) {
          const Fragment<float> weight = fast::exp2(scores.fragments[i][j] - origins[i]);
          gradients.fragments[i][j] = weight * (gradients.fragments[i][j] - deltas[i]);
#if NORMALISED
          block_weights += weight;
#endif
        }
#if EXACT_DELTA
        sums[i].add<KEY_FRAGMENTS>(gradients.fragments[i], block_weights);
#endif
      }
#if SOFTCAP || defined(FLEX_SLOPE)
      gradients.multiply(slopes);
#endif
      accumulate<ELEMENT, DQ_SLICE, OWN_DQ_COLUMNS>(dq_tile, gradients, k_rows_lane);
    }
#if EXACT_DELTA
    if (walk > 0) {
      break;
    }
    // From here on `deltas` holds what the second walk subtracts.
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
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

#if BLOCK_LISTS
  if (listed.impossible) {
    dq_tile.fill(NAN);
  }
#endif
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
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
      dq_rows.store(query, column + first_dq + d * FRAGMENT, dq_tile.fragments[i][d] * scale);
    }
  }
}
