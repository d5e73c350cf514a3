// Attention backward, the gradients of k and v: dv = weights^T dout and
// dk = scale * (weights * (dout v^T - delta))^T q, over every query head that shares the KV head.
//
// Dao, "FlashAttention-2" (2023), algorithm 2. A threadgroup owns BLOCK_K keys of one KV head and
// walks over the queries of all its heads, so that no other threadgroup writes its rows. Tiles are
// transposed: a row is a key and a column a query.
//
// COLUMN_SIMDGROUPS SIMD groups share rows. Each owns a part of the columns of dk and dv, and
// computes the weights of a part of the scores over all columns; they exchange finished weights.
//
// Where that leaves cores idle, HEAD_SPLITS threadgroups have a part of the query heads each. They
// write parts of the gradients in float32, which flash_bwd_sum adds up.
#include "backward.h"
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "head_splits.h"
#include "output.h"
#include "own_rows.h"

// The specialisation: as flash_fwd's, with BLOCK_Q, the queries staged at a time, DK_SLICE and
// DV_SLICE, the columns of dk and dv that a threadgroup owns, SLICES of each, and ROWS_IN_REGISTERS
// for k and v alike; NORMALISED, as flash_bwd_dq's; and HEAD_SPLITS, if there are several.
constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_FRAGMENTS = fragments(HEAD_DIM_V);
constant constexpr int V_COLUMNS = V_FRAGMENTS * FRAGMENT;
constant constexpr int QUERY_FRAGMENTS = BLOCK_Q / FRAGMENT;
// A SIMD group's share of the scores: of the queries, and of the rows where queries are too few.
constant constexpr int QUERY_PARTS = query_parts(QUERY_FRAGMENTS, COLUMN_SIMDGROUPS);
constant constexpr int ROW_PARTS = COLUMN_SIMDGROUPS / QUERY_PARTS;
constant constexpr int OWN_QUERY_FRAGMENTS = QUERY_FRAGMENTS / QUERY_PARTS;
constant constexpr int OWN_ROW_FRAGMENTS = ROW_FRAGMENTS / ROW_PARTS;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_K = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
// A SIMD group's share of the columns.
constant constexpr int OWN_DK_COLUMNS = DK_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int OWN_DV_COLUMNS = DV_SLICE / COLUMN_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int Q_PAIRS_BYTES = BLOCK_Q * padded(QK_COLUMNS) * sizeof(ELEMENT);
constant constexpr int DOUT_PAIRS_BYTES = BLOCK_Q * padded(V_COLUMNS) * sizeof(ELEMENT);
// SIMD groups that share rows read the rows of q and dout out of pairs. Others read more of them,
// which are staged a second time.
constant constexpr bool STAGES_ROWS = COLUMN_SIMDGROUPS == 1;
constant constexpr int Q_ROWS_BYTES =
    STAGES_ROWS ? BLOCK_Q * padded(DK_SLICE) * sizeof(ELEMENT) : 0;
constant constexpr int DOUT_ROWS_BYTES =
    STAGES_ROWS ? BLOCK_Q * padded(DV_SLICE) * sizeof(ELEMENT) : 0;
#if NORMALISED
constant constexpr int STATISTICS_BYTES = 3 * BLOCK_Q * sizeof(float);
#else
constant constexpr int STATISTICS_BYTES = 2 * BLOCK_Q * sizeof(float);
#endif

static_assert(Q_PAIRS_BYTES + DOUT_PAIRS_BYTES + Q_ROWS_BYTES + DOUT_ROWS_BYTES +
                      STATISTICS_BYTES <=
                  THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");
constant constexpr int PARTS = SIMDGROUPS * OWN_ROW_FRAGMENTS * OWN_QUERY_FRAGMENTS * SIMD_LANES;
static_assert(BLOCK_Q <= THREADS, "a thread a query stages the statistics");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>;
using KeyTile = OwnRows<Keys, QK_COLUMNS, OWN_ROW_FRAGMENTS>;
using ValueTile = OwnRows<Values, V_COLUMNS, OWN_ROW_FRAGMENTS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dkv(
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
  threadgroup uint4 q_pairs[Q_PAIRS_BYTES / sizeof(uint4)];        // [BLOCK_Q / 2, D] pairs
  threadgroup uint4 dout_pairs[DOUT_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_Q / 2, Dv] pairs
#if COLUMN_SIMDGROUPS == 1
  threadgroup uint4 q_rows[Q_ROWS_BYTES / sizeof(uint4)];        // [BLOCK_Q, DK_SLICE]
  threadgroup uint4 dout_rows[DOUT_ROWS_BYTES / sizeof(uint4)];  // [BLOCK_Q, DV_SLICE]
#endif
  threadgroup float origins[BLOCK_Q];
  threadgroup float deltas[BLOCK_Q];
#if ROWS_IN_THREADGROUP
  threadgroup uint4 k_chunks[SIMDGROUPS / QUERY_PARTS * KeyTile::SIZE];
  threadgroup uint4 v_chunks[SIMDGROUPS / QUERY_PARTS * ValueTile::SIZE];
#endif
#if COLUMN_SIMDGROUPS > 1
  threadgroup Fragment<float> weight_parts[PARTS];
  threadgroup Fragment<float> gradient_parts[PARTS];
#endif
#if NORMALISED
  threadgroup float weight_factors[BLOCK_Q];
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  GridPlace place;
#if FLEX_ORDER
  place.reset_in_order<FLEX_KV_BLOCK / BLOCK_K, SLICES * HEAD_SPLITS>(
      inputs.block_order, problem.flex, threadgroup_position, threadgroups);
#else
  place.reset(threadgroup_position, threadgroups);
#endif
  const int batch = place.batch;
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
  const ushort column = fragment_column(lane);
  const int last_key = sequence.kv_length - 1;
  const int tile_key = place.tile * BLOCK_K;
#if VARLEN || FLEX_ORDER
  if (tile_key >= rows) {
    return;
  }
#endif
  const int simdgroup_key = tile_key + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int part = simdgroup % COLUMN_SIMDGROUPS;
  // The scores that the SIMD group computes are those of its part's queries and keys.
  const int part_query = part % QUERY_PARTS * OWN_QUERY_FRAGMENTS * FRAGMENT;
  const int part_key = part / QUERY_PARTS * OWN_ROW_FRAGMENTS * FRAGMENT;
  const int lane_key = simdgroup_key + part_key + row;

  Visibility visible;
  visible.reset(sequence, problem);
  // The queries that see any of the threadgroup's keys, any of the SIMD group's, and all of those.
  const int first_key = sequence.first_key;
  const bool has_keys = tile_key <= last_key && tile_key + BLOCK_K > first_key;
  Range tile_range;
  tile_range.begin = visible.queries_of(max(tile_key, first_key)).begin;
  tile_range.end = has_keys ? visible.queries_of(min(tile_key + BLOCK_K - 1, last_key)).end : 0;
  const Range of_first = visible.queries_of(simdgroup_key);
  const Range of_last = visible.queries_of(simdgroup_key + SIMDGROUP_ROWS - 1);
  const int seen_begin = visible.queries_of(max(simdgroup_key, first_key)).begin;
  const int seen_end =
      simdgroup_key > last_key || simdgroup_key + SIMDGROUP_ROWS <= first_key
          ? 0
          : visible.queries_of(min(simdgroup_key + SIMDGROUP_ROWS - 1, last_key)).end;

  const int dk_column = part * OWN_DK_COLUMNS + column;
  const int dv_column = part * OWN_DV_COLUMNS + column;
  const threadgroup Pair* q_pairs_lane =
      lane_of_pairs<ELEMENT, QK_COLUMNS>(q_pairs, row, part_query + column);
  const threadgroup Pair* dout_pairs_lane =
      lane_of_pairs<ELEMENT, V_COLUMNS>(dout_pairs, row, part_query + column);
#if COLUMN_SIMDGROUPS > 1
  const auto q_rows_lane =
      lane_of_paired_rows<ELEMENT, QK_COLUMNS, SLICES * DK_SLICE == QK_COLUMNS>(
          q_pairs, row, column, slice * DK_SLICE + part * OWN_DK_COLUMNS);
  const auto dout_rows_lane =
      lane_of_paired_rows<ELEMENT, V_COLUMNS, SLICES * DV_SLICE == V_COLUMNS>(
          dout_pairs, row, column, slice * DV_SLICE + part * OWN_DV_COLUMNS);
#else
  const threadgroup Pair* q_rows_lane = lane_of_rows<ELEMENT, DK_SLICE>(q_rows, row, dk_column);
  const threadgroup Pair* dout_rows_lane =
      lane_of_rows<ELEMENT, DV_SLICE>(dout_rows, row, dv_column);
#endif

  KeyTile k_tile;    // [OWN_ROW_FRAGMENTS * 8, D]
  ValueTile v_tile;  // [OWN_ROW_FRAGMENTS * 8, Dv]
#if ROWS_IN_THREADGROUP
  // One of the SIMD groups with the same keys leaves them for all. Staging has a barrier.
  k_tile.keep_in(k_chunks, simdgroup / QUERY_PARTS, lane);
  v_tile.keep_in(v_chunks, simdgroup / QUERY_PARTS, lane);
  const bool loads = has_keys && part_query == 0;
#else
  const bool loads = has_keys;
#endif
  if (loads) {
    k_tile.load(inputs.keys(batch, kv_head, sequence, problem), lane_key, last_key, column);
    v_tile.load(inputs.values(batch, kv_head, sequence, problem), lane_key, last_key, column);
  }
  RegisterTile<float, ROW_FRAGMENTS, OWN_DK_COLUMNS / FRAGMENT> dk_tile;
  RegisterTile<float, ROW_FRAGMENTS, OWN_DV_COLUMNS / FRAGMENT> dv_tile;
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
    Rules<OWN_ROW_FRAGMENTS, true> rules;
    rules.reset(inputs, batch, head, lane_key, column, visible, sequence, problem);
#if DROPOUT
    dropout.move_to(batch, head);
#endif

    // Blocks begin at multiples of BLOCK_Q, the first of them at the first query that sees these
    // keys.
    const int q_begin = tile_range.begin / BLOCK_Q * BLOCK_Q;
#if BLOCK_LISTS
    ListedBlocks<LIST_Q_BLOCK> listed;
    listed.reset(inputs, problem.flex, batch, head, tile_key / LIST_KV_BLOCK, sequence.q_length);
    for (int q_block = listed.first(); !listed.done; q_block = listed.next(q_block + BLOCK_Q)) {
#else
    for (int q_block = q_begin; q_block < tile_range.end; q_block += BLOCK_Q) {
#endif
      // Every SIMD group has read the tiles of the block before.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_Q, QK_COLUMNS, THREADS, true>(q_pairs, queries, q_block, 0,
                                                               sequence.q_length, thread_index);
      stage_pairs<ELEMENT, BLOCK_Q, V_COLUMNS, THREADS, true>(dout_pairs, out_gradients, q_block, 0,
                                                              sequence.q_length, thread_index);
#if COLUMN_SIMDGROUPS == 1
      stage_rows<ELEMENT, BLOCK_Q, DK_SLICE, THREADS, HEAD_DIM_QK, SLICES>(
          q_rows, queries, q_block, 0, sequence.q_length, slice * DK_SLICE, thread_index);
      stage_rows<ELEMENT, BLOCK_Q, DV_SLICE, THREADS, HEAD_DIM_V, SLICES>(
          dout_rows, out_gradients, q_block, 0, sequence.q_length, slice * DV_SLICE, thread_index);
#endif
      if (thread_index < BLOCK_Q) {
        const int query = q_block + thread_index;
        const bool exists = query < sequence.q_length;
        origins[thread_index] = exists ? weight_origin(lse[statistics + query]) : INFINITY;
        deltas[thread_index] = exists ? delta[statistics + query] : 0.0f;
#if NORMALISED
        weight_factors[thread_index] =
            exists ? weight_factor(normalisers[statistics + query], lse[statistics + query]) : 1.0f;
#endif
      }
      // The tiles are whole.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool unseen = q_block >= seen_end || q_block + BLOCK_Q <= seen_begin;
      if (!unseen) {
        const int block = q_block + part_query;
        ScoreTile weights;    // scores, then weights: [OWN_ROW_FRAGMENTS * 8, a part of BLOCK_Q]
        ScoreTile gradients;  // d loss / d weight, then d loss / d score: the same
        ScoreTile slopes;
        multiply_transposed<ELEMENT, QK_COLUMNS>(weights, k_tile, q_pairs_lane);
        rules.value_and_slope(weights, slopes, block, BLOCK_MASKED, inputs, problem);
        if (q_block < of_last.begin || q_block + BLOCK_Q > of_first.end) {
          visible.apply<true>(weights, lane_key, block + column);
#ifdef FLEX_SLOPE
          // It may be infinite at the score 0 of queries that do not exist.
          visible.apply<true>(slopes, lane_key, block + column, 0.0f);
#endif
        }
        UNROLL
        for (short j = 0; j < OWN_QUERY_FRAGMENTS; j++) {
          const short query = part_query + j * FRAGMENT + column;
          const Fragment<float> origin = Fragment<float>(origins[query], origins[query + 1]);
          UNROLL
          for (short i = 0; i < OWN_ROW_FRAGMENTS; i++) {
            weights.fragments[i][j] = fast::exp2(weights.fragments[i][j] - origin);
#if NORMALISED
            weights.fragments[i][j] *=
                Fragment<float>(weight_factors[query], weight_factors[query + 1]);
#endif
          }
        }
#if DROPOUT
        const uint kept =
            dropout.kept<true, OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(lane_key, block + column);
        ScoreTile dropped = weights;
        dropout.apply(dropped, kept);
#else
        thread const ScoreTile& dropped = weights;
#endif
#if COLUMN_SIMDGROUPS > 1
        leave_part(dropped, weight_parts, simdgroup, lane);
#else
        accumulate<ELEMENT, DV_SLICE, OWN_DV_COLUMNS>(dv_tile, dropped, dout_rows_lane);
#endif

        multiply_transposed<ELEMENT, V_COLUMNS>(gradients, v_tile, dout_pairs_lane);
#if DROPOUT
        dropout.apply(gradients, kept);
#endif
        UNROLL
        for (short j = 0; j < OWN_QUERY_FRAGMENTS; j++) {
          const short query = part_query + j * FRAGMENT + column;
          const Fragment<float> row_delta = Fragment<float>(deltas[query], deltas[query + 1]);
          UNROLL
          for (short i = 0; i < OWN_ROW_FRAGMENTS; i++) {
            gradients.fragments[i][j] =
                weights.fragments[i][j] * (gradients.fragments[i][j] - row_delta);
          }
        }
#if SOFTCAP || defined(FLEX_SLOPE)
        gradients.multiply(slopes);
#endif
#if COLUMN_SIMDGROUPS > 1
        leave_part(gradients, gradient_parts, simdgroup, lane);
#else
        accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, gradients, q_rows_lane);
#endif
      }
#if COLUMN_SIMDGROUPS > 1
      // The parts are there.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (!unseen) {
        RegisterTile<float, ROW_FRAGMENTS, QUERY_FRAGMENTS> all;  // [rows, BLOCK_Q]
        gather_parts<OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(all, weight_parts, simdgroup, lane);
        accumulate<ELEMENT, DV_SLICE, OWN_DV_COLUMNS>(dv_tile, all, dout_rows_lane);
        // Both tiles at a time would take too many registers.
        simdgroup_barrier(mem_flags::mem_none);
        gather_parts<OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(all, gradient_parts, simdgroup, lane);
        accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, all, q_rows_lane);
      }
#endif
    }
#if BLOCK_LISTS
    if (listed.impossible) {
      dk_tile.fill(NAN);
      dv_tile.fill(NAN);
    }
#endif
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int key = simdgroup_key + row + i * FRAGMENT;
    if (key >= rows) {
      continue;
    }
    // Keys that do not exist have no gradient, whatever their memory holds.
    const bool exists = key >= first_key && key <= last_key;
    UNROLL
    for (short d = 0; d < OWN_DK_COLUMNS / FRAGMENT; d++) {
      dk_rows.store(
          key, dk_column + d * FRAGMENT,
          exists ? dk_tile.fragments[i][d] * problem.softmax_scale : Fragment<float>(0.0f, 0.0f));
    }
    UNROLL
    for (short d = 0; d < OWN_DV_COLUMNS / FRAGMENT; d++) {
      dv_rows.store(key, dv_column + d * FRAGMENT,
                    exists ? dv_tile.fragments[i][d] : Fragment<float>(0.0f, 0.0f));
    }
  }
}
