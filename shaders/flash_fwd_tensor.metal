// Attention forward on tensor tiles: what flash_fwd.metal computes, by Metal 4's tensor operations.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, 32 at a time. Each SIMD
// group owns 16 queries. K and V come straight from device memory, where the SIMD groups of a
// threadgroup find them in the cache: as in MLX and PyTorch, nothing is staged. Scores and weights
// never leave a SIMD group's registers.
#define TENSOR_TILES 1

#include "forward.h"
#include "tensor_products.h"

// The specialisation, given by the host: ELEMENT (float only if TF32 is allowed), HEAD_DIM_QK,
// HEAD_DIM_V, V_SLICE, SIMDGROUPS, Q_IN_REGISTERS, WIDE_LOADS (of q too); and the features of
// flash_fwd.metal.
constant constexpr int SIMDGROUP_ROWS = TENSOR_SIMDGROUP_ROWS;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;

static_assert(BLOCK_K == SPAN_COLUMNS, "a product gives scores of 32 keys");
static_assert(V_SLICE % SPAN_COLUMNS == 0, "a slice of V is a multiple of 32 columns");

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
  ForwardTile<BLOCK_Q> tile;
  if (!tile.begin(inputs, params, out, softmax_lse, threadgroup_position, threadgroups,
                  thread_index)) {
    return;
  }
  const int batch = tile.place.batch;
  const int head = tile.place.head;
  const int slice = tile.place.slice;
  const Sequence sequence = tile.sequence;

  const ushort row = fragment_row(lane);
  const ushort column = tensor_column(lane);
  const int simdgroup_query = tile.place.first_query + simdgroup * SIMDGROUP_ROWS;
  const int lane_query = simdgroup_query + row;
  SeenRows seen_keys;
  seen_keys.reset(tile.visible, simdgroup_query, SIMDGROUP_ROWS, tile.last_query);

  Keys keys = inputs.keys(batch, tile.place.kv_head, sequence, problem);
  Values values = inputs.values(batch, tile.place.kv_head, sequence, problem);
  QueryRows<ELEMENT, Queries, HEAD_DIM_QK, Q_IN_REGISTERS> q_tile;  // [16, D]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, tile.last_query, column);
  Rules<TENSOR_ROWS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, tile.visible, sequence, problem);
  Dropout dropout;
  if (DROPOUT) {
    dropout.reset(inputs.rng_state, problem);
    dropout.move_to(batch, head);
  }
  RowsSoftmax<TENSOR_ROWS> softmax;
  softmax.reset(inputs, head);
  CutWeights cut_weights[TENSOR_ROWS];
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    cut_weights[i].reset();
  }
  RegisterTile<float, TENSOR_ROWS, V_FRAGMENTS> o;  // [16, V_SLICE]
  o.fill(0.0f);

  Blocks<LIST_KV_BLOCK> blocks;
  blocks.reset(inputs, problem.flex, batch, head, tile.place.first_query / LIST_Q_BLOCK,
               tile.keys());
  for (int kv_block = blocks.first(); !blocks.done; kv_block = blocks.next(kv_block + BLOCK_K)) {
    move_to(keys, values, kv_block, BLOCK_K, lane);
    // Holds the SIMD groups together, so that rows that one has read are still in the cache when
    // the others read them. It orders no memory.
    threadgroup_barrier(mem_flags::mem_none);
    if (!seen_keys.any_in(kv_block, BLOCK_K)) {
      continue;
    }
    KeyPlaces<Keys> key_places;
    key_places.find(keys, kv_block, sequence.first_key, sequence.kv_length, row);
    BlockTile scores;  // [16, BLOCK_K]
    multiply_transposed<KvTileElement, HEAD_DIM_QK>(scores, q_tile, keys, key_places);
    rules.value(scores, kv_block, blocks.masked, inputs, problem);
    if (seen_keys.hides_in(kv_block, BLOCK_K)) {
      tile.visible.apply<false>(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[TENSOR_ROWS];
    softmax.update(scores, corrections);
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      cut_weights[i].update(scores.fragments[i], corrections[i]);
    }
    if (DROPOUT) {
      // Sums of rows are those of all weights.
      dropout.drop(scores,
                   dropout.kept<false, TENSOR_ROWS, SPAN_FRAGMENTS>(lane_query, kv_block + column));
    }
    KeyPlaces<Values> value_places;
    value_places.find(values, kv_block, sequence.first_key, sequence.kv_length, row);
    accumulate<KvTileElement, HEAD_DIM_V, V_SLICE>(o, corrections, scores, values, value_places,
                                                   slice * V_SLICE, column);
  }
  // As in MLX and PyTorch, before the results of tensor operations are read.
  threadgroup_barrier(mem_flags::mem_none);

  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    const float keys_sum = blocks.impossible ? NAN : softmax.rows[i].row_sum();
    const float sink_weight = softmax.sink_weight(i, inputs, head);
    const float cut_sum = with_sink(cut_weights[i].row_sum(), sink_weight);
    const int query = lane_query + i * FRAGMENT;
    if (query > tile.last_query) {
      continue;
    }
    // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
    const bool sees_nothing = keys_sum == 0.0f;
    const float normaliser = (DROPOUT ? dropout.keep_scale : 1.0f) / cut_sum;
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      tile.out_rows.store(
          query, column + column_offset(d),
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser);
    }
    if (column == 0 && slice == 0) {
      tile.lse_rows[query] = softmax.rows[i].logsumexp(with_sink(keys_sum, sink_weight));
    }
  }
}
