// Scores of DeepSeek-V3.2's lightning indexer (2025), which choose each query's keys: the sum over
// heads of weight * ReLU(scale * q k^T). All heads have the same keys.
//
// A threadgroup stages BLOCK_K keys. Each SIMD group has one query. Its heads are the rows of
// fragments, so that the sum over heads is a sum over rows.
#include "params/index_scores.h"
#include "piece.h"
#include "products.h"

// The host defines ELEMENT, WEIGHT_ELEMENT, HEAD_DIM, BLOCK_K, SIMDGROUPS, and the features
// WIDE_LOADS, ROW_PAIRS, LONG_OFFSETS and CAUSAL.
FEATURE(CAUSAL)

constant constexpr int COLUMNS = fragments(HEAD_DIM) * FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int TILE_BYTES = BLOCK_K * padded(COLUMNS) * sizeof(ELEMENT);

static_assert(TILE_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tile of keys fits in 32 KiB of threadgroup memory");

using Rows = Operand<ELEMENT, HEAD_DIM>;
using HeadTile = OperandTile<ELEMENT, Rows, 1, COLUMNS / FRAGMENT, false>;
using Products = RegisterTile<float, 1, KEY_FRAGMENTS>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void index_scores(
    const device ELEMENT* q [[buffer(INDEX_SCORES_Q)]],
    const device ELEMENT* k [[buffer(INDEX_SCORES_K)]],
    const device WEIGHT_ELEMENT* weights [[buffer(INDEX_SCORES_WEIGHTS)]],
    device float* out [[buffer(INDEX_SCORES_OUT)]],
    GRID_PARAMS(IndexScoresParams, INDEX_SCORES_PARAMS), GRID_POSITION, THREAD_INDICES) {
  SET_GRID_POSITION(IndexScoresParams)
  threadgroup uint4 k_tile[TILE_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs

  const int batch = threadgroup_position.z;
  const int first_key = threadgroup_position.x * BLOCK_K;
  const int query = int(threadgroup_position.y) * SIMDGROUPS + simdgroup;
  const int last_query = params.q_length - 1;
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);

  Rows keys;
  keys.reset(k, params.k_strides, batch, 0, 0);
  stage_pairs<ELEMENT, BLOCK_K, COLUMNS, THREADS, false>(k_tile, keys, first_key, 0,
                                                         params.kv_length, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (query > last_query) { return; }
  const threadgroup Fragment<ELEMENT>* k_lane =
      lane_of_pairs<ELEMENT, COLUMNS>(k_tile, row, column);
  Rows heads;
  heads.reset(q, params.q_strides, batch, query, 0);
  const Offset own_weights = row_offset(params.weight_strides, batch, query, 0);

  Fragment<float> sums[KEY_FRAGMENTS];  // of the lane's rows
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) { sums[j] = Fragment<float>(0.0f, 0.0f); }
  for (int first_head = 0; first_head < params.heads; first_head += FRAGMENT) {
    const int head = first_head + row;
    HeadTile tile;
    tile.load(heads, head, params.heads - 1, column);
    Products products;  // [8, BLOCK_K]
    multiply_transposed<ELEMENT, COLUMNS>(products, tile, k_lane);
    const Offset last = Offset(min(head, params.heads - 1));
    const float weight = float(weights[own_weights + last * Offset(params.weight_strides.row)]);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short e = 0; e < LANE_COLUMNS; e++) {
        const float score = products.fragments[0][j][e] * params.softmax_scale;
        // NaN stays NaN. Rows after the last head, which load the last head again, add nothing.
        sums[j][e] += head < params.heads ? weight * (score < 0.0f ? 0.0f : score) : 0.0f;
      }
    }
  }

  const int64_t last_seen = CAUSAL ? query + params.q_offset : params.kv_length;
  device float* out_row = out + (int64_t(batch) * params.q_length + query) * params.kv_length;
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    UNROLL
    for (short e = 0; e < LANE_COLUMNS; e++) {
      const float sum = fragment_column_sum(sums[j][e]);
      const int key = first_key + column + j * FRAGMENT + e;
      if (row == 0 && key < params.kv_length) { out_row[key] = key <= last_seen ? sum : -INFINITY; }
    }
  }
}
