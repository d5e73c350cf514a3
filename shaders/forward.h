// The code that the forward kernels share: everything except the products with keys and values.
#pragma once

#include "blocks.h"
#include "flex.h"
#include "grid.h"
#include "output.h"
#include "parts.h"
#include "softmax.h"

constant constexpr int V_SLICES = (HEAD_DIM_V + V_SLICE - 1) / V_SLICE;
constant constexpr int V_FRAGMENTS = V_SLICE / FRAGMENT;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

// BLOCK queries of one head, and a slice of the columns of v and out.
template <int BLOCK>
struct ForwardTile {
  QueryTilePlace<BLOCK, V_SLICES> place;
  Sequence sequence;
  Visibility visible;
  int last_query;
  Output<ELEMENT, HEAD_DIM_V, V_SLICE> out_rows;
  device float* lse_rows;

  // Returns false, after writing zeros or NaN, if there is nothing to compute.
  METAL_FUNC bool begin(thread const FlashInputs& inputs, constant FlashFwdParams& params,
                        device ELEMENT* out, device float* softmax_lse, uint3 position, uint3 grid,
                        ushort thread_index) thread {
    constant FlashParams& problem = params.problem;
    place.reset(inputs, problem, position, grid);
    sequence = inputs.sequence(place.batch, problem);
    last_query = sequence.q_length - 1;
    out_rows.reset(out, params.out_strides, place.batch, place.head, sequence.q_start, place.slice);
    lse_rows = softmax_lse +
               (row_offset(params.lse_strides, place.batch, place.head, 0) + sequence.q_start);
    if (sequence.is_left_out(place.batch, problem)) {
      fill(place.number * THREADS + thread_index, grid.x * THREADS);
      return false;
    }
    visible.reset(sequence, problem);
    return !(VARLEN || FLEX_ORDER) || place.first_query <= last_query;
  }

  // Rows `first`, `first + step`, ... of a sequence that is left out.
  METAL_FUNC void fill(int first, int step) const thread {
    out_rows.fill(sequence.impossible ? NAN : 0.0f, first, sequence.q_length, step);
    for (int query = first; place.slice == 0 && query < sequence.q_length; query += step) {
      lse_rows[query] = sequence.impossible ? NAN : -INFINITY;
    }
  }

  // The keys that any query of the tile sees.
  METAL_FUNC Range keys() const thread {
    return {visible.keys_of(place.first_query).begin,
            visible.keys_of(min(place.first_query + BLOCK - 1, last_query)).end};
  }
};

// The sum of a row's weights. keys_sum: the sum without the sink's weight.
METAL_FUNC float with_sink(float keys_sum, float sink_weight) {
  return SINK ? keys_sum + sink_weight : keys_sum;
}

// Weights whose products with values need no rounding. Tensor tiles have CutWeights.
struct WholeWeights {
  METAL_FUNC void reset() thread {}
  METAL_FUNC void update(thread Fragment<float>*, float) thread {}
  METAL_FUNC float row_sum(float whole_sum) const thread { return whole_sum; }
};

// The softmax of a tile's rows, whose scores arrive block by block.
template <int ROWS, typename Weights = WholeWeights>
struct RowsSoftmax {
  OnlineSoftmax rows[ROWS];
  Weights weights[ROWS];

  METAL_FUNC void reset(thread const FlashInputs& inputs, int head) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      rows[i].reset(SINK ? inputs.sink_log2(head) : MASKED_ROW_MAX);
      weights[i].reset();
    }
  }

  // The weight of row i's sink, relative to the row's maximum.
  METAL_FUNC float sink_weight(short i, thread const FlashInputs& inputs, int head) const thread {
    return SINK ? inputs.sink_weight(head, rows[i].row_max) : 0.0f;
  }

  // Scores become weights. corrections[i] becomes the factor of row i's earlier sums.
  template <int COLUMNS>
  METAL_FUNC void update(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                         thread float* corrections) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      corrections[i] = rows[i].template update<COLUMNS>(scores.fragments[i]);
      weights[i].update(scores.fragments[i], corrections[i]);
    }
  }
};

// The whole forward of a SIMD group's ROWS x 8 queries. Products has the interface of StagedKv.
template <typename Products, int ROWS>
METAL_FUNC void attend(thread const FlashInputs& inputs, device ELEMENT* out,
                       device float* softmax_lse, constant FlashFwdParams& params,
                       threadgroup uint4* tiles, threadgroup Fragment<float>* score_parts,
                       uint3 threadgroup_position, uint3 threadgroups, ushort thread_index,
                       ushort simdgroup, ushort lane) {
  constexpr int SIMDGROUP_ROWS = ROWS * FRAGMENT;
  constexpr int BLOCK_Q = SIMDGROUPS / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
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
  const ushort column = lane_column(lane);
  const int simdgroup_query =
      tile.place.first_query + simdgroup / COLUMN_SIMDGROUPS * SIMDGROUP_ROWS;
  const int lane_query = simdgroup_query + row;
  SeenRows seen_keys;
  seen_keys.reset(tile.visible, simdgroup_query, SIMDGROUP_ROWS, tile.last_query);

  Products kv;
  kv.reset(tiles, score_parts, inputs.keys(batch, tile.place.kv_head, sequence, problem),
           inputs.values(batch, tile.place.kv_head, sequence, problem), sequence, slice,
           thread_index, simdgroup, lane);
  typename Products::QueryTile q_tile;  // [ROWS * 8, D]
  q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, tile.last_query,
              column + kv.query_column());
  Rules<ROWS, false> rules;
  rules.reset(inputs, batch, head, lane_query, column, tile.visible, sequence, problem);
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  dropout.move_to(batch, head);
  typename Products::Softmax softmax;
  softmax.reset(inputs, head);
  typename Products::Out o;  // [ROWS * 8, the SIMD group's columns of V_SLICE]
  o.fill(0.0f);

  Blocks<LIST_KV_BLOCK> blocks;
  blocks.reset(inputs, problem.flex, batch, head, tile.place.first_query / LIST_Q_BLOCK,
               tile.keys());
  for (int kv_block = blocks.first(); !blocks.done; kv_block = blocks.next(kv_block + BLOCK_K)) {
    kv.begin_block(kv_block);
    const bool seen = seen_keys.any_in(kv_block, BLOCK_K);
    if (!seen && !COLUMNS_SPLIT) { continue; }
    typename Products::Scores scores;  // [ROWS * 8, BLOCK_K]
    kv.multiply_keys(scores, q_tile, seen);
    if (!seen) { continue; }
    rules.value(scores, kv_block, blocks.masked, inputs, problem);
    if (seen_keys.hides_in(kv_block, BLOCK_K)) {
      tile.visible.template apply<false>(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[ROWS];
    softmax.update(scores, corrections);
    if (DROPOUT) {
      // Row sums include dropped weights.
      const uint kept =
          dropout.kept<false, ROWS, BLOCK_K / FRAGMENT>(lane_query, kv_block + column);
      if (TENSOR_TILES) {  // the normaliser scales: scaled weights would need more than 11 bits
        dropout.drop(scores, kept);
      } else {
        dropout.apply(scores, kept);
      }
    }
    kv.accumulate_values(o, corrections, scores);
  }
  if (TENSOR_TILES) {
    // MLX and PyTorch also have a barrier before they read the results of tensor operations.
    threadgroup_barrier(mem_flags::mem_none);
  }

  UNROLL
  for (short i = 0; i < ROWS; i++) {
    float keys_sum = softmax.rows[i].row_sum();
    float values_sum = softmax.weights[i].row_sum(keys_sum);
    if (blocks.impossible) { keys_sum = values_sum = NAN; }
    const float sink_weight = softmax.sink_weight(i, inputs, head);
    const int query = lane_query + i * FRAGMENT;
    if (query > tile.last_query) { continue; }
    // A row that sees no key is 0, even if 0 * NaN of a masked value was added.
    const bool sees_nothing = keys_sum == 0.0f;
    const float keep_scale = TENSOR_TILES && DROPOUT ? dropout.keep_scale : 1.0f;
    const float normaliser = keep_scale / with_sink(values_sum, sink_weight);
    UNROLL
    for (short d = 0; d < Products::OUT_FRAGMENTS; d++) {
      tile.out_rows.store(
          query, kv.out_column(d),
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser);
    }
    if (column == 0 && simdgroup % COLUMN_SIMDGROUPS == 0 && slice == 0) {
      const float row_sum = with_sink(keys_sum, sink_weight);
      tile.lse_rows[query] = softmax.rows[i].logsumexp(row_sum);
    }
  }
}
