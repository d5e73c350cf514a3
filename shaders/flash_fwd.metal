// Attention forward: softmax(q k^T * scale) v, block by block over the keys.
//
// Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), algorithm 1.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, BLOCK_K at a time. Each
// SIMD group owns ROW_FRAGMENTS x 8 queries, so that one K or V fragment serves that many matrix
// operations; scores and weights never leave its registers. Half and bfloat16 fragments feed the
// matrix unit as they are; weights stay float32.
//
// How a block of K and V reaches the products is StagedKv's business, or without KV_STAGED
// DirectKv's.
#include "forward.h"
#include "staged.h"
#include "unstaged.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, V_SLICE, ROW_FRAGMENTS,
// BLOCK_K, SIMDGROUPS, Q_IN_REGISTERS, ROW_PAIRS, WIDE_LOADS; COLUMN_SIMDGROUPS 2 if two SIMD
// groups share rows; KV_STAGED 0 without staging; and of the features that are on BAND, CHUNKED,
// VARLEN, SEQUSED_K, LEFTPAD_K, MASK, MASK_PAIRS, BIAS, BIAS_PAIRS, BIAS_ELEMENT, SOFTCAP, ALIBI,
// SINK, SINK_ELEMENT, Q_ROTARY, K_ROTARY, WIDE_ROTARY, ROTARY_ELEMENT, ROTARY_DIM,
// ROTARY_INTERLEAVED, DROPOUT, PAGE_SIZE, CACHE_BATCH_IDX, KV_ELEMENT, KV_FORMAT, V_FORMAT,
// K_SCALE, V_SCALE; or FLEX with FLEX_CAPTURES, FLEX_SCORE, FLEX_MASK, FLEX_Q_BLOCK, FLEX_KV_BLOCK,
// FLEX_FULL_BLOCKS, FLEX_ORDER.
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int SCORE_PARTS = SIMDGROUPS * ROW_FRAGMENTS * KEY_FRAGMENTS * SIMD_LANES;

using KeysValues = conditional_t<KV_STAGED, StagedKv<ROW_FRAGMENTS, KEY_FRAGMENTS>,
                                 DirectKv<ROW_FRAGMENTS, KEY_FRAGMENTS>>;
using QueryTile = KeysValues::QueryTile;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd(
    FLASH_PARAMETERS device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]],
    constant FlashFwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  THREADGROUP_ARRAY(KV_STAGED, uint4, tiles, TILE_BYTES / sizeof(uint4))
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, score_parts, SCORE_PARTS)

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
  const ushort column = fragment_column(lane);
  const int simdgroup_query =
      tile.place.first_query + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int lane_query = simdgroup_query + row;
  SeenRows seen_keys;
  seen_keys.reset(tile.visible, simdgroup_query, SIMDGROUP_ROWS, tile.last_query);

  KeysValues kv;
  kv.reset(tiles, score_parts, inputs.keys(batch, tile.place.kv_head, sequence, problem),
           inputs.values(batch, tile.place.kv_head, sequence, problem), sequence, slice,
           thread_index, simdgroup, lane);
  QueryTile q_tile;  // [ROW_FRAGMENTS * 8, D]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, tile.last_query,
              column + kv.query_column());
  Rules<ROW_FRAGMENTS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, tile.visible, sequence, problem);
  Dropout dropout;
  if (DROPOUT) {
    dropout.reset(inputs.rng_state, problem);
    dropout.move_to(batch, head);
  }
  RowsSoftmax<ROW_FRAGMENTS> softmax;
  softmax.reset(inputs, head);
  KeysValues::Out o;  // [ROW_FRAGMENTS * 8, V_SLICE]
  o.fill(0.0f);

  Blocks<LIST_KV_BLOCK> blocks;
  blocks.reset(inputs, problem.flex, batch, head, tile.place.first_query / LIST_Q_BLOCK,
               tile.keys());
  for (int kv_block = blocks.first(); !blocks.done; kv_block = blocks.next(kv_block + BLOCK_K)) {
    kv.begin_block(kv_block);
    const bool seen = seen_keys.any_in(kv_block, BLOCK_K);
    if (!seen && !COLUMNS_SPLIT) {
      continue;
    }
    KeysValues::Scores scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    kv.multiply_keys(scores, q_tile, seen);
    if (!seen) {
      continue;
    }
    rules.value(scores, kv_block, blocks.masked, inputs, problem);
    if (seen_keys.hides_in(kv_block, BLOCK_K)) {
      tile.visible.apply<false>(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[ROW_FRAGMENTS];
    softmax.update(scores, corrections);
    if (DROPOUT) {
      // Sums of rows are those of all weights.
      dropout.apply(
          scores, dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(lane_query, kv_block + column));
    }
    kv.accumulate_values(o, corrections, scores);
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const float keys_sum = blocks.impossible ? NAN : softmax.rows[i].row_sum();
    const float row_sum = with_sink(keys_sum, softmax.sink_weight(i, inputs, head));
    const int query = lane_query + i * FRAGMENT;
    if (query > tile.last_query) {
      continue;
    }
    // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
    const bool sees_nothing = keys_sum == 0.0f;
    const float normaliser = 1.0f / row_sum;
    UNROLL
    for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
      tile.out_rows.store(
          query, kv.out_column(d),
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser);
    }
    if (column == 0 && simdgroup % COLUMN_SIMDGROUPS == 0 && slice == 0) {
      tile.lse_rows[query] = softmax.rows[i].logsumexp(row_sum);
    }
  }
}
