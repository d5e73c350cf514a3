// Attention backward, the gradients of what is added to the scores: that of a bias is
// weights * (dout v^T - delta), summed over whatever it is broadcast over, and that of ALiBi's
// slope the sum of it times -|distance|.
//
// Dao, "FlashAttention-2" (2023), algorithm 2. A threadgroup owns one tile of the bias, in
// registers, and walks over every tile of scores that shares it, so that no other threadgroup
// writes there; dimensions of the bias itself that are broadcast are summed once, at the end. Where
// that leaves few threadgroups, the walk is split and each part has its own result.
#include "backward.h"
#include "own_rows.h"
#include "softmax.h"

// The specialisation: as flash_fwd's, with ROWS_IN_REGISTERS for q and dout alike;
// QUERIES_SHARED and KEYS_SHARED, whether all queries or keys share one element; DBIAS_ELEMENT;
// DBIAS_PAIRS, whether columns 2i and 2i + 1 of the result are one aligned vector; and SLOPES for
// the gradient of ALiBi's slopes; NORMALISED, as flash_bwd_dkv's.
constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_FRAGMENTS = fragments(HEAD_DIM_V);
constant constexpr int V_COLUMNS = V_FRAGMENTS * FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_PAIRS_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT);
constant constexpr int V_PAIRS_BYTES = BLOCK_K * padded(V_COLUMNS) * sizeof(ELEMENT);
constant constexpr int COLUMN_SUMS = SIMDGROUPS * BLOCK_K;
constant constexpr int COLUMN_SUMS_BYTES = COLUMN_SUMS * sizeof(float);

static_assert(K_PAIRS_BYTES + V_PAIRS_BYTES + COLUMN_SUMS_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");
static_assert(BLOCK_K <= THREADS, "a thread a key adds the SIMD groups' sums");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using QueryTile = OperandTile<ELEMENT, Queries, ROW_FRAGMENTS, QK_FRAGMENTS, ROWS_IN_REGISTERS>;
using GradientTile =
    OperandTile<ELEMENT, OutGradients, ROW_FRAGMENTS, V_FRAGMENTS, ROWS_IN_REGISTERS>;

// One tile of the scores of all (batch, head), and how to walk over those that share a tile of the
// bias: keys first, then queries, heads and batches.
struct ScoreTiles {
  Range batches;
  Range heads;
  Range q_tiles;
  Range kv_tiles;
  int batch;
  int head;
  int q_tile;
  int kv_tile;

  // All of a dimension that is shared, else the one at `owned`.
  METAL_FUNC static Range range(bool shared, int owned, int size) {
    Range result;
    result.begin = shared ? 0 : owned;
    result.end = shared ? size : owned + 1;
    return result;
  }

  // The tile at position `index` of the walk.
  METAL_FUNC void seek(int64_t index) thread {
    kv_tile = next(index, kv_tiles);
    q_tile = next(index, q_tiles);
    head = next(index, heads);
    batch = next(index, batches);
  }

  METAL_FUNC static int next(thread int64_t& index, thread const Range& range) {
    const int64_t size = range.end - range.begin;
    const int position = range.begin + int(index % size);
    index /= size;
    return position;
  }

  METAL_FUNC void advance() thread {
    if (++kv_tile < kv_tiles.end) {
      return;
    }
    kv_tile = kv_tiles.begin;
    if (++q_tile < q_tiles.end) {
      return;
    }
    q_tile = q_tiles.begin;
    if (++head < heads.end) {
      return;
    }
    head = heads.begin;
    batch++;
  }
};

// The sum over the rows of a fragment, of each of the lane's two columns.
METAL_FUNC Fragment<float> fragment_column_sum(Fragment<float> x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_bias(
    FLASH_PARAMETERS const device ELEMENT* dout [[buffer(FLASH_BWD_DOUT)]],
    const device float* lse [[buffer(FLASH_BWD_LSE)]],
    const device float* delta [[buffer(FLASH_BWD_DELTA)]],
#if NORMALISED
    const device float* normalisers [[buffer(FLASH_BWD_NORMALISERS)]],
#endif
    device DBIAS_ELEMENT* dbias [[buffer(FLASH_BWD_DBIAS)]],
    constant FlashBwdBiasParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, Dv] pairs of keys
#if QUERIES_SHARED
  threadgroup float column_sums[COLUMN_SUMS];  // [SIMDGROUPS, BLOCK_K]
#endif

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;

  const int split = threadgroup_position.x % params.splits;
  const int own_kv_tile = threadgroup_position.x / params.splits;
  const int own_q_tile = threadgroup_position.y;
  const int own_head = threadgroup_position.z % params.own_heads;
  const int own_batch = threadgroup_position.z / params.own_heads;

  ScoreTiles at;
  at.batches = ScoreTiles::range(params.batches_shared, own_batch, problem.batch);
  at.heads = ScoreTiles::range(params.heads_shared, own_head, params.heads);
  at.q_tiles =
      ScoreTiles::range(QUERIES_SHARED, own_q_tile, (problem.q_length + BLOCK_Q - 1) / BLOCK_Q);
  at.kv_tiles =
      ScoreTiles::range(KEYS_SHARED, own_kv_tile, (problem.kv_length + BLOCK_K - 1) / BLOCK_K);
  const int64_t first_tile = split * params.split_tiles;
  const int64_t last_tile = min(first_tile + params.split_tiles, params.shared_tiles);
  at.seek(first_tile);

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const threadgroup Pair* k_pairs_lane = lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column);
  const threadgroup Pair* v_pairs_lane = lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column);

#if DROPOUT
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
#endif

  QueryTile q_tile;        // [ROW_FRAGMENTS * 8, D]
  GradientTile dout_tile;  // [ROW_FRAGMENTS * 8, Dv]
  float origins[ROW_FRAGMENTS];
  float deltas[ROW_FRAGMENTS];
#if NORMALISED
  float weight_factors[ROW_FRAGMENTS];
#endif
  ScoreTile sum;
  sum.fill(0.0f);
  // Which tiles of K and V are staged, and of which queries the rows are loaded.
  int staged_batch = -1;
  int staged_kv_head = -1;
  int staged_kv_tile = -1;
  int loaded_batch = -1;
  int loaded_head = -1;
  int loaded_q_tile = -1;

  for (int64_t tile = first_tile; tile < last_tile; tile++, at.advance()) {
    const int batch = at.batch;
    const int head = at.head;
    const int kv_head = head / problem.queries_per_kv;
    const Sequence sequence = inputs.sequence(batch, problem);
#if VARLEN || SEQUSED_K || LEFTPAD_K
    if (sequence.impossible) {
      sum.fill(NAN);
      continue;
    }
#endif
    const int last_query = sequence.q_length - 1;
    const int tile_query = at.q_tile * BLOCK_Q;
    const int kv_block = at.kv_tile * BLOCK_K;
#if VARLEN
    if (tile_query > last_query) {
      continue;
    }
#endif
    Visibility visible;
    visible.reset(sequence, problem);
    if (kv_block >= visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end ||
        kv_block + BLOCK_K <= visible.keys_of(tile_query).begin) {
      continue;
    }
    if (batch != staged_batch || kv_head != staged_kv_head || at.kv_tile != staged_kv_tile) {
      // Every SIMD group has read the tiles of the block before.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
          k_pairs, inputs.keys(batch, kv_head, sequence, problem), kv_block, sequence.first_key,
          sequence.kv_length, thread_index);
      stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
          v_pairs, inputs.values(batch, kv_head, sequence, problem), kv_block, sequence.first_key,
          sequence.kv_length, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      staged_batch = batch;
      staged_kv_head = kv_head;
      staged_kv_tile = at.kv_tile;
    }

    // What any query of the SIMD group sees, and what all of them see.
    const int simdgroup_query = tile_query + simdgroup * SIMDGROUP_ROWS;
    const int lane_query = simdgroup_query + row;
    const Range of_first = visible.keys_of(simdgroup_query);
    const Range of_last = visible.keys_of(min(simdgroup_query + SIMDGROUP_ROWS - 1, last_query));
    if (simdgroup_query > last_query || kv_block >= of_last.end ||
        kv_block + BLOCK_K <= of_first.begin) {
      continue;
    }
    if (batch != loaded_batch || head != loaded_head || at.q_tile != loaded_q_tile) {
      OutGradients out_gradients;
      out_gradients.rows = first_row(dout, params.dout_strides, batch, head, sequence.q_start);
      out_gradients.row_stride = params.dout_strides.row;
      q_tile.load(inputs.queries(batch, head, sequence, problem), lane_query, last_query, column);
      dout_tile.load(out_gradients, lane_query, last_query, column);
      const int64_t statistics =
          batch * params.lse_strides.batch + head * params.lse_strides.head + sequence.q_start;
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        const int query = min(lane_query + i * FRAGMENT, last_query);
        origins[i] = weight_origin(lse[statistics + query]);
        deltas[i] = delta[statistics + query];
#if NORMALISED
        weight_factors[i] = weight_factor(normalisers[statistics + query], lse[statistics + query]);
#endif
      }
      loaded_batch = batch;
      loaded_head = head;
      loaded_q_tile = at.q_tile;
    }

    ScoreRules<ROW_FRAGMENTS, false> rules;
    rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);
    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    multiply_transposed<ELEMENT, QK_COLUMNS>(scores, q_tile, k_pairs_lane);
    rules.value(scores, kv_block, true, inputs, problem);
    if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
      visible.apply<false>(scores, lane_query, kv_block + column);
    }

    ScoreTile gradients;  // d loss / d weight, then d loss / d score: [ROW_FRAGMENTS * 8, BLOCK_K]
    multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_pairs_lane);
#if DROPOUT
    dropout.move_to(batch, head);
    dropout.apply(gradients,
                  dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(lane_query, kv_block + column));
#endif
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      // Rows past the last, which repeat it, must not be summed.
      const bool exists = lane_query + i * FRAGMENT <= last_query;
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const Fragment<float> score = scores.fragments[i][j];
        Fragment<float> weight = fast::exp2(score - origins[i]);
#if NORMALISED
        weight *= weight_factors[i];
#endif
        Fragment<float> gradient = weight * (gradients.fragments[i][j] - deltas[i]);
#if SLOPES
        const float distance = float(rules.distance - kv_block) + float((i - j) * FRAGMENT);
        gradient *= -Fragment<float>(fabs(distance), fabs(distance - 1.0f));
#endif
        // What a query does not see adds nothing, whatever the values there are.
        sum.fragments[i][j] += Fragment<float>(exists && score.x != -INFINITY ? gradient.x : 0.0f,
                                               exists && score.y != -INFINITY ? gradient.y : 0.0f);
      }
    }
  }

  device DBIAS_ELEMENT* result = dbias + split * params.split_stride +
                                 own_batch * params.dbias_strides.batch +
                                 own_head * params.dbias_strides.head;
  const int tile_key = own_kv_tile * BLOCK_K;
#if QUERIES_SHARED
  // The lanes of row 0 have the SIMD group's sums over its rows.
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    Fragment<float> of_rows = sum.fragments[0][j];
    UNROLL
    for (short i = 1; i < ROW_FRAGMENTS; i++) {
      of_rows += sum.fragments[i][j];
    }
    of_rows = fragment_column_sum(of_rows);
    if (row == 0) {
      threadgroup float* own = column_sums + simdgroup * BLOCK_K + j * FRAGMENT + column;
      own[0] = of_rows.x;
      own[1] = of_rows.y;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#if KEYS_SHARED
  if (thread_index == 0) {
    float total = 0.0f;
    for (int i = 0; i < COLUMN_SUMS; i++) {
      total += column_sums[i];
    }
    result[0] = DBIAS_ELEMENT(total);
  }
#else
  if (thread_index < BLOCK_K && tile_key + thread_index < problem.kv_length) {
    float total = 0.0f;
    UNROLL
    for (short i = 0; i < SIMDGROUPS; i++) {
      total += column_sums[i * BLOCK_K + thread_index];
    }
    result[(tile_key + thread_index) * params.dbias_strides.key] = DBIAS_ELEMENT(total);
  }
#endif
#else
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int query = own_q_tile * BLOCK_Q + simdgroup * SIMDGROUP_ROWS + i * FRAGMENT + row;
    device DBIAS_ELEMENT* result_row = result + query * params.dbias_strides.query;
#if KEYS_SHARED
    Fragment<float> of_columns = sum.fragments[i][0];
    UNROLL
    for (short j = 1; j < KEY_FRAGMENTS; j++) {
      of_columns += sum.fragments[i][j];
    }
    const float total = fragment_row_sum(of_columns.x + of_columns.y);
    if (column == 0 && query < problem.q_length) {
      result_row[0] = DBIAS_ELEMENT(total);
    }
#else
    if (query >= problem.q_length) {
      continue;
    }
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const int key = tile_key + column + j * FRAGMENT;
      const Fragment<float> value = sum.fragments[i][j];
#if DBIAS_PAIRS
      if (key < problem.kv_length) {
        *reinterpret_cast<device Fragment<DBIAS_ELEMENT>*>(result_row + key) =
            Fragment<DBIAS_ELEMENT>(DBIAS_ELEMENT(value.x), DBIAS_ELEMENT(value.y));
      }
#else
      if (key < problem.kv_length) {
        result_row[key] = DBIAS_ELEMENT(value.x);
      }
      if (key + 1 < problem.kv_length) {
        result_row[key + 1] = DBIAS_ELEMENT(value.y);
      }
#endif
    }
#endif
  }
#endif
}
