// Attention forward on tensor tiles: what flash_fwd.metal computes, by Metal 4's tensor operations.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, 32 at a time. Each SIMD
// group owns 16 queries. K and V come straight from device memory, where the SIMD groups of a
// threadgroup find them in the cache: as in MLX and PyTorch, nothing is staged. Scores and weights
// never leave a SIMD group's registers.
#define TENSOR_TILES 1

#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "inputs.h"
#include "output.h"
#include "softmax.h"
#include "tensor_products.h"

// The specialisation, given by the host: ELEMENT (float only if TF32 is allowed), HEAD_DIM_QK,
// HEAD_DIM_V, V_SLICE, SIMDGROUPS, Q_IN_REGISTERS, WIDE_LOADS (of q too); and the features of
// flash_fwd.metal.
constant constexpr int V_SLICES = (HEAD_DIM_V + V_SLICE - 1) / V_SLICE;
constant constexpr int V_FRAGMENTS = V_SLICE / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = TENSOR_SIMDGROUP_ROWS;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

static_assert(BLOCK_K == SPAN_COLUMNS, "a product gives scores of 32 keys");
static_assert(V_SLICE % SPAN_COLUMNS == 0, "a slice of V is a multiple of 32 columns");

using OutTile = RegisterTile<float, TENSOR_ROWS, V_FRAGMENTS>;
using QueryTile = QueryRows<ELEMENT, Queries, HEAD_DIM_QK, Q_IN_REGISTERS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd_tensor(
    FLASH_PARAMETERS device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]],
    constant FlashFwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
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
  const ushort column = tensor_column(lane);
  const int last_query = sequence.q_length - 1;
  const int tile_query = q_block * BLOCK_Q;
#if VARLEN || FLEX_ORDER
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

  Keys keys = inputs.keys(batch, kv_head, sequence, problem);
  Values values = inputs.values(batch, kv_head, sequence, problem);
  Rules<TENSOR_ROWS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);

  QueryTile q_tile;  // [16, D]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query, column);
#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
#endif
#if SINK
  const float sink_log2 = inputs.sink_log2(head);
#endif
  OutTile o;  // [16, V_SLICE]
  o.fill(0.0f);
  OnlineSoftmax softmax[TENSOR_ROWS];
  CutWeights cut_weights[TENSOR_ROWS];
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
#if SINK
    softmax[i].reset(sink_log2);
#else
    softmax[i].reset();
#endif
    cut_weights[i].reset();
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
    // Holds the SIMD groups together, so that rows that one has read are still in the cache when
    // the others read them. It orders no memory.
    threadgroup_barrier(mem_flags::mem_none);
    if (kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin) {
      continue;
    }

    KeyPlaces<Keys> key_places;
    key_places.find(keys, kv_block, sequence.first_key, sequence.kv_length, row);
    BlockTile scores;  // [16, BLOCK_K]
    multiply_transposed<KvTileElement, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
    rules.value(scores, kv_block, BLOCK_MASKED, inputs, problem);
    if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
      visible.apply<false>(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[TENSOR_ROWS];
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      corrections[i] = softmax[i].update<SPAN_FRAGMENTS>(scores.fragments[i]);
      cut_weights[i].update(scores.fragments[i], corrections[i]);
    }
#if DROPOUT
    // Sums of rows are those of all weights.
    dropout.drop(scores,
                 dropout.kept<false, TENSOR_ROWS, SPAN_FRAGMENTS>(lane_query, kv_block + column));
#endif
    KeyPlaces<Values> value_places;
    value_places.find(values, kv_block, sequence.first_key, sequence.kv_length, row);
    accumulate<KvTileElement, HEAD_DIM_V, V_SLICE>(o, corrections, scores, values, value_places,
                                                   slice * V_SLICE, column);
  }
  // As in MLX and PyTorch, before the results of tensor operations are read.
  threadgroup_barrier(mem_flags::mem_none);

  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
#if BLOCK_LISTS
    const float keys_sum = listed.impossible ? NAN : softmax[i].row_sum();
#else
    const float keys_sum = softmax[i].row_sum();
#endif
    const float cut_sum = cut_weights[i].row_sum();
#if SINK
    const float sink_weight = inputs.sink_weight(head, softmax[i].row_max);
#else
    const float sink_weight = 0.0f;
#endif
    const int query = lane_query + i * FRAGMENT;
    if (query > last_query) {
      continue;
    }
    // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
    const bool sees_nothing = keys_sum == 0.0f;
#if DROPOUT
    const float normaliser = dropout.keep_scale / (cut_sum + sink_weight);
#else
    const float normaliser = 1.0f / (cut_sum + sink_weight);
#endif
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      out_rows.store(query, column + column_offset(d),
                     sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser);
    }
    if (column == 0 && slice == 0) {
      lse_rows[query] = softmax[i].logsumexp(keys_sum + sink_weight);
    }
  }
}
