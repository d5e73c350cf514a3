// Attention backward, the gradient of q: dq = scale * (weights * (dout v^T - delta)) k.
//
// Dao, "FlashAttention-2" (2023), algorithm 2, with the loops the other way round: a threadgroup
// owns BLOCK_Q queries and walks over the keys, so that nobody else writes its rows.
#include "backward.h"
#include "output.h"

// The specialisation: as flash_fwd's, with DQ_SLICE, the columns of dq that a threadgroup owns, and
// ROWS_IN_REGISTERS for q and dout alike; and SLOPE_GRADIENTS for those of ALiBi's slopes.
constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_FRAGMENTS = fragments(HEAD_DIM_V);
constant constexpr int V_COLUMNS = V_FRAGMENTS * FRAGMENT;
constant constexpr int DQ_SLICES = (HEAD_DIM_QK + DQ_SLICE - 1) / DQ_SLICE;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_PAIRS_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT);
constant constexpr int V_PAIRS_BYTES = BLOCK_K * padded(V_COLUMNS) * sizeof(ELEMENT);
constant constexpr int K_ROWS_BYTES = BLOCK_K * padded(DQ_SLICE) * sizeof(ELEMENT);

static_assert(K_PAIRS_BYTES + V_PAIRS_BYTES + K_ROWS_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using QueryTile = OperandTile<ELEMENT, Queries, ROW_FRAGMENTS, QK_FRAGMENTS, ROWS_IN_REGISTERS>;
using GradientTile =
    OperandTile<ELEMENT, OutGradients, ROW_FRAGMENTS, V_FRAGMENTS, ROWS_IN_REGISTERS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dq(
    FLASH_PARAMETERS const device ELEMENT* dout [[buffer(FLASH_BWD_DOUT)]],
    const device float* lse [[buffer(FLASH_BWD_LSE)]],
    const device float* delta [[buffer(FLASH_BWD_DELTA)]],
    device ELEMENT* dq [[buffer(FLASH_BWD_DQ)]],
    constant FlashBwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, Dv] pairs of keys
  threadgroup uint4 k_rows[K_ROWS_BYTES / sizeof(uint4)];    // [BLOCK_K, DQ_SLICE]

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  const int batch = threadgroup_position.z;
  const int head = threadgroup_position.y / DQ_SLICES;
  const int slice = threadgroup_position.y % DQ_SLICES;
  const int kv_head = head / problem.queries_per_kv;
#if BAND
  // Later queries may see more keys: start the longest rows first.
  const int q_block = threadgroups.x - 1 - threadgroup_position.x;
#else
  const int q_block = threadgroup_position.x;
#endif

  const Sequence sequence = inputs.sequence(batch, problem);
  Output<ELEMENT, HEAD_DIM_QK, DQ_SLICE> dq_rows;
  dq_rows.reset(dq, params.dq_strides, batch, head, sequence.q_start, slice);
#if VARLEN || SEQUSED_K || LEFTPAD_K
  if (sequence.impossible || batch == problem.batch) {
    dq_rows.fill(sequence.impossible ? NAN : 0.0f, threadgroup_position.x * THREADS + thread_index,
                 sequence.q_length, threadgroups.x * THREADS);
    return;
  }
#endif

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int last_query = sequence.q_length - 1;
  const int tile_query = q_block * BLOCK_Q;
#if VARLEN
  if (tile_query > last_query) {
    return;
  }
#endif
  const int simdgroup_query = tile_query + simdgroup * SIMDGROUP_ROWS;
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
  const ScoreRules<ROW_FRAGMENTS, false> rules =
      inputs.score_rules<ROW_FRAGMENTS, false>(batch, head, lane_query, column, visible, problem);

#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
#endif

  const threadgroup Pair* k_pairs_lane = lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column);
  const threadgroup Pair* v_pairs_lane = lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column);
  const threadgroup Pair* k_rows_lane = lane_of_rows<ELEMENT, DQ_SLICE>(k_rows, row, column);

  QueryTile q_tile;  // [ROW_FRAGMENTS * 8, D]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query, column);
  GradientTile dout_tile;  // [ROW_FRAGMENTS * 8, Dv]
  dout_tile.load(out_gradients, lane_query, last_query, column);
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
  RegisterTile<float, ROW_FRAGMENTS, DQ_SLICE / FRAGMENT> dq_tile;
  dq_tile.fill(0.0f);

  // Blocks begin at multiples of BLOCK_K, the first of them where the tile's first query looks.
  const int kv_begin = visible.keys_of(tile_query).begin / BLOCK_K * BLOCK_K;
  const int kv_end = visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end;
  for (int kv_block = kv_begin; kv_block < kv_end; kv_block += BLOCK_K) {
    // Every SIMD group has read the tiles of the block before.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
        k_pairs, keys, kv_block, sequence.first_key, sequence.kv_length, thread_index);
    stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
        v_pairs, values, kv_block, sequence.first_key, sequence.kv_length, thread_index);
    stage_rows<ELEMENT, BLOCK_K, DQ_SLICE, THREADS, HEAD_DIM_QK>(
        k_rows, keys, kv_block, sequence.first_key, sequence.kv_length, slice * DQ_SLICE,
        thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin) {
      continue;
    }

    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    ScoreTile slopes;
    multiply_transposed<ELEMENT, QK_COLUMNS>(scores, q_tile, k_pairs_lane);
    scores_from_products(scores, slopes, rules, kv_block, problem);
    if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
      visible.apply<false>(scores, lane_query, kv_block + column);
    }

    ScoreTile gradients;  // d loss / d weight, then d loss / d score: [ROW_FRAGMENTS * 8, BLOCK_K]
    multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_pairs_lane);
#if DROPOUT
    dropout.apply(gradients,
                  dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(lane_query, kv_block + column));
#endif
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const Fragment<float> weight = fast::exp2(scores.fragments[i][j] - origins[i]);
        gradients.fragments[i][j] = weight * (gradients.fragments[i][j] - deltas[i]);
      }
    }
#if SOFTCAP
    gradients.multiply(slopes);
#endif
    accumulate<ELEMENT, DQ_SLICE>(dq_tile, gradients, k_rows_lane);
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int query = lane_query + i * FRAGMENT;
    if (query > last_query) {
      continue;
    }
    UNROLL
    for (short d = 0; d < DQ_SLICE / FRAGMENT; d++) {
      dq_rows.store(query, column + d * FRAGMENT, dq_tile.fragments[i][d] * problem.softmax_scale);
    }
  }
}
