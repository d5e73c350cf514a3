// Attention forward: softmax(q k^T * scale) v, block by block over the keys.
//
// Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), algorithm 1.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, BLOCK_K at a time, staged
// in threadgroup memory. Each SIMD group owns ROW_FRAGMENTS x 8 queries, so that one K or V
// fragment serves that many matrix operations; scores and weights never leave its registers. Half
// and bfloat16 fragments feed the matrix unit as they are; weights stay float32.
//
// Where the rows are too many for one SIMD group's registers, two share them (COLUMN_SIMDGROUPS):
// each has half of the columns of q, k, v and out, and they add up their parts of the scores.
//
// Without KV_STAGED, each SIMD group reads K and V itself (unstaged.h), and there is no barrier.
#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "inputs.h"
#include "output.h"
#include "products.h"
#include "softmax.h"
#include "unstaged.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, V_SLICE, ROW_FRAGMENTS,
// BLOCK_K, SIMDGROUPS, Q_IN_REGISTERS, ROW_PAIRS, WIDE_LOADS; Q_IN_THREADGROUP to keep Q there, and
// COLUMN_SIMDGROUPS 2 if two SIMD groups share rows; KV_STAGED 0 without staging; and of the
// features that are on BAND, CHUNKED, VARLEN, SEQUSED_K, LEFTPAD_K, MASK, MASK_PAIRS, BIAS,
// BIAS_PAIRS, BIAS_ELEMENT, SOFTCAP, ALIBI, SINK, SINK_ELEMENT, Q_ROTARY, K_ROTARY, WIDE_ROTARY,
// ROTARY_ELEMENT, ROTARY_DIM, ROTARY_INTERLEAVED, DROPOUT, PAGE_SIZE, CACHE_BATCH_IDX, KV_ELEMENT,
// KV_FORMAT, K_SCALE, V_SCALE; or FLEX with FLEX_CAPTURES, FLEX_SCORE, FLEX_MASK, FLEX_Q_BLOCK,
// FLEX_KV_BLOCK, FLEX_FULL_BLOCKS, FLEX_ORDER.
constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_SLICES = (HEAD_DIM_V + V_SLICE - 1) / V_SLICE;
constant constexpr int V_FRAGMENTS = V_SLICE / FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
// A SIMD group's share of the columns.
constant constexpr int OWN_QK_FRAGMENTS = QK_FRAGMENTS / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_FRAGMENTS = V_FRAGMENTS / COLUMN_SIMDGROUPS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_TILE_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(KvTileElement);
constant constexpr int V_TILE_BYTES = BLOCK_K * padded(V_SLICE) * sizeof(KvTileElement);
// SIMD groups that share columns stage V where K was.
constant constexpr int V_TILE_BEGIN = COLUMN_SIMDGROUPS > 1 ? 0 : K_TILE_BYTES;
constant constexpr int TILE_BYTES =
    V_TILE_BEGIN + V_TILE_BYTES > K_TILE_BYTES ? V_TILE_BEGIN + V_TILE_BYTES : K_TILE_BYTES;

static_assert(V_SLICE % FRAGMENT == 0, "a slice of V is a multiple of 8 columns");
static_assert(BLOCK_K % FRAGMENT == 0, "BLOCK_K is a multiple of 8");
static_assert(!KV_STAGED || TILE_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the K and V tiles fit in 32 KiB of threadgroup memory");
static_assert(KV_STAGED || (COLUMN_SIMDGROUPS == 1 && HEAD_DIM_QK % KEY_SPAN == 0 &&
                            V_SLICE % SPAN_COLUMNS == 0),
              "without staging, a SIMD group reads whole spans of all columns");

using Pair = Fragment<KvTileElement>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using OutTile = RegisterTile<float, ROW_FRAGMENTS, OWN_V_FRAGMENTS>;
#if !KV_STAGED
using QueryTile = SpanOperandTile<ELEMENT, Queries, ROW_FRAGMENTS, QK_COLUMNS>;
#elif Q_IN_THREADGROUP
using QueryTile = KeptOperandTile<ELEMENT, Queries, ROW_FRAGMENTS, OWN_QK_FRAGMENTS>;
#else
using QueryTile = OperandTile<ELEMENT, Queries, ROW_FRAGMENTS, OWN_QK_FRAGMENTS, Q_IN_REGISTERS>;
#endif

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd(
    FLASH_PARAMETERS device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]],
    constant FlashFwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
#if KV_STAGED
  threadgroup uint4 tiles[TILE_BYTES / sizeof(uint4)];
  threadgroup uint4* k_tile = tiles;                                 // [BLOCK_K / 2, D] pairs
  threadgroup uint4* v_tile = tiles + V_TILE_BEGIN / sizeof(uint4);  // [BLOCK_K, V_SLICE]
#endif
#if Q_IN_THREADGROUP
  threadgroup uint4 q_chunks[SIMDGROUPS * QueryTile::SIZE];
#endif
#if COLUMN_SIMDGROUPS > 1
  threadgroup Fragment<float> score_parts[SIMDGROUPS * ROW_FRAGMENTS * KEY_FRAGMENTS * SIMD_LANES];
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  GridPlace place;
#if FLEX_ORDER
  place.reset_in_order<FLEX_Q_BLOCK / BLOCK_Q, V_SLICES>(inputs.block_order, problem.flex,
                                                         threadgroup_position, threadgroups);
#else
  place.reset(threadgroup_position, threadgroups);
#endif
  const int batch = place.batch;
  const int head = place.column / V_SLICES;
  const int slice = place.column % V_SLICES;
  const int kv_head = head / problem.queries_per_kv;
#if BAND
  // Later queries may see more keys: start the longest rows first.
  const int q_block = threadgroups.x - 1 - place.tile;
#else
  const int q_block = place.tile;
#endif

  const Sequence sequence = inputs.sequence(batch, problem);
  Output<ELEMENT, HEAD_DIM_V, V_SLICE> out_rows;
  out_rows.reset(out, params.out_strides, batch, head, sequence.q_start, slice);
  device float* lse_rows = softmax_lse + batch * params.lse_strides.batch +
                           head * params.lse_strides.head + sequence.q_start;
#if VARLEN || SEQUSED_K || LEFTPAD_K || CACHE_BATCH_IDX
  if (sequence.impossible || batch == problem.batch) {
    const int first = place.tile * THREADS + thread_index;
    const int step = threadgroups.x * THREADS;
    out_rows.fill(sequence.impossible ? NAN : 0.0f, first, sequence.q_length, step);
    for (int query = first; slice == 0 && query < sequence.q_length; query += step) {
      lse_rows[query] = sequence.impossible ? NAN : -INFINITY;
    }
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
  const int first_qk = part * OWN_QK_FRAGMENTS * FRAGMENT;  // columns
  const int first_v = part * OWN_V_FRAGMENTS * FRAGMENT;
  const int lane_query = simdgroup_query + row;

  Visibility visible;
  visible.reset(sequence, problem);
  // What any query of the SIMD group sees, and what all of them see.
  const Range of_first = visible.keys_of(simdgroup_query);
  const Range of_last = visible.keys_of(min(simdgroup_query + SIMDGROUP_ROWS - 1, last_query));
  const int seen_begin = of_first.begin;
  const int seen_end = simdgroup_query > last_query ? 0 : of_last.end;

  Keys keys = inputs.keys(batch, kv_head, sequence, problem);
  Values values = inputs.values(batch, kv_head, sequence, problem);
#if KV_STAGED
  const threadgroup Pair* k_lane =
      lane_of_pairs<KvTileElement, QK_COLUMNS>(k_tile, row, column) + first_qk;
  const threadgroup Pair* v_lane =
      lane_of_rows<KvTileElement, V_SLICE>(v_tile, row, column + first_v);
#endif
  Rules<ROW_FRAGMENTS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);

  QueryTile q_tile;  // [ROW_FRAGMENTS * 8, D]
#if Q_IN_THREADGROUP
  q_tile.keep_in(q_chunks, simdgroup, lane);
#endif
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query,
              column + first_qk);
#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
#endif
#if SINK
  const float sink_log2 = inputs.sink_log2(head);
#endif
  OutTile o;  // [ROW_FRAGMENTS * 8, V_SLICE]
  o.fill(0.0f);
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
#if SINK
    softmax[i].reset(sink_log2);
#else
    softmax[i].reset();
#endif
  }

  // Blocks begin at multiples of BLOCK_K, the first of them at the first key that the tile sees.
  const int kv_begin = visible.keys_of(tile_query).begin / BLOCK_K * BLOCK_K;
  const int kv_end = visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end;
#if BLOCK_LISTS
  ListedBlocks<LIST_KV_BLOCK> listed;
  listed.reset(inputs, problem.flex, batch, head, tile_query / LIST_Q_BLOCK, kv_end);
  for (int kv_block = listed.first(); !listed.done; kv_block = listed.next(kv_block + BLOCK_K)) {
#else
  for (int kv_block = kv_begin; kv_block < kv_end; kv_block += BLOCK_K) {
#endif
    move_to(keys, values, kv_block, BLOCK_K, lane);
#if KV_STAGED
    // Every SIMD group has read the tiles of the block before.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_pairs<KvTileElement, BLOCK_K, QK_COLUMNS, THREADS, false>(
        k_tile, keys, kv_block, sequence.first_key, sequence.kv_length, thread_index);
#if COLUMN_SIMDGROUPS == 1
    stage_rows<KvTileElement, BLOCK_K, V_SLICE, THREADS, HEAD_DIM_V>(
        v_tile, values, kv_block, sequence.first_key, sequence.kv_length, slice * V_SLICE,
        thread_index);
#endif
    // The tiles are whole.
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
    const bool unseen = kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin;
    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
#if COLUMN_SIMDGROUPS > 1
    if (!unseen) {
      multiply_transposed<KvTileElement, QK_COLUMNS, OWN_QK_FRAGMENTS * FRAGMENT>(scores, q_tile,
                                                                                  k_lane);
      store_part(scores, score_parts, simdgroup, lane);
    }
    // Every SIMD group has read the tile of K and left its part of the scores.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<KvTileElement, BLOCK_K, V_SLICE, THREADS, HEAD_DIM_V>(
        v_tile, values, kv_block, sequence.first_key, sequence.kv_length, slice * V_SLICE,
        thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
    if (unseen) {
      continue;
    }
#if COLUMN_SIMDGROUPS > 1
    add_other_part(scores, score_parts, simdgroup, lane);
#elif KV_STAGED
    multiply_transposed<KvTileElement, QK_COLUMNS>(scores, q_tile, k_lane);
#else
  multiply_keys<KvTileElement>(scores, q_tile, keys, kv_block, sequence.kv_length, row, column);
#endif
    rules.value(scores, kv_block, BLOCK_MASKED, inputs, problem);
    if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
      visible.apply<false>(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      corrections[i] = softmax[i].update<KEY_FRAGMENTS>(scores.fragments[i]);
    }
#if DROPOUT
    // Sums of rows are those of all weights.
    dropout.apply(scores,
                  dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(lane_query, kv_block + column));
#endif
#if KV_STAGED
    accumulate<KvTileElement, V_SLICE, OWN_V_FRAGMENTS * FRAGMENT>(o, corrections, scores, v_lane);
#else
    accumulate_values<KvTileElement, V_SLICE>(o, corrections, scores, values, kv_block, sequence,
                                              slice * V_SLICE + first_unit_column(column), row);
#endif
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
#if BLOCK_LISTS
    const float keys_sum = listed.impossible ? NAN : softmax[i].row_sum();
#else
    const float keys_sum = softmax[i].row_sum();
#endif
#if SINK
    const float row_sum = keys_sum + inputs.sink_weight(head, softmax[i].row_max);
#else
    const float row_sum = keys_sum;
#endif
    const int query = lane_query + i * FRAGMENT;
    if (query > last_query) {
      continue;
    }
    // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
    const bool sees_nothing = keys_sum == 0.0f;
    const float normaliser = 1.0f / row_sum;
    UNROLL
    for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
      const int out_column =
          KV_STAGED ? column + first_v + d * FRAGMENT : first_unit_column(column) + span_offset(d);
      out_rows.store(query, out_column,
                     sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser);
    }
    if (column == 0 && part == 0 && slice == 0) {
      lse_rows[query] = softmax[i].logsumexp(row_sum);
    }
  }
}
