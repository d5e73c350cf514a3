// Attention backward: the gradients of a bias and of ALiBi's slopes. The gradient of a bias is
// weights * (dout v^T - delta), summed over all dimensions along which the bias broadcasts. The
// gradient of a slope is the sum of the same terms times -|distance|.
//
// Dao, "FlashAttention-2" (2023), algorithm 2. A threadgroup owns one tile of the bias, in
// registers, and walks over all tiles of scores that share it, so that no other threadgroup writes
// there. Sums over shared queries or keys are computed once, at the end. If there are few
// threadgroups, the walk is split and each split has its own result.
#include "score_gradients.h"
#include "softmax.h"

// The host defines what flash_fwd needs, and ROWS_IN_REGISTERS for q and dout; QUERIES_SHARED if
// all queries share one element, KEYS_SHARED if all keys share one; DBIAS_ELEMENT; DBIAS_PAIRS if
// columns 2i and 2i + 1 of the result are one aligned vector; ALIBI_SLOPE_GRADIENT; and NORMALISED.
constant constexpr int COLUMN_SUMS = SIMDGROUPS * BLOCK_K;
constant constexpr int COLUMN_SUMS_BYTES = COLUMN_SUMS * sizeof(float);

static_assert(K_PAIRS_BYTES + apart(V_PAIRS_BYTES) + COLUMN_SUMS_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");
static_assert(BLOCK_K <= THREADS, "for each key, one thread adds the SIMD groups' sums");

// The current tile of a walk over the tiles of scores that share a tile of the bias: along the keys
// first, then along queries, heads and batches.
struct ScoreTiles {
  Range batches;
  Range heads;
  Range q_tiles;
  Range kv_tiles;
  int batch;
  int head;
  int q_tile;
  int kv_tile;

  // All positions if the dimension is shared, and otherwise only position `owned`.
  METAL_FUNC static Range range(bool shared, int owned, int size) {
    return {shared ? 0 : owned, shared ? size : owned + 1};
  }

  // The tile at position `index` of the walk.
  METAL_FUNC void seek(int64_t index) thread {
    kv_tile = next(index, kv_tiles);
    q_tile = next(index, q_tiles);
    head = next(index, heads);
    batch = next(index, batches);
  }

  METAL_FUNC static int next(thread int64_t& index, thread const Range& range) {
    return range.begin + pop_dimension(index, range.end - range.begin);
  }

  METAL_FUNC void advance() thread {
    if (++kv_tile < kv_tiles.end) { return; }
    kv_tile = kv_tiles.begin;
    if (++q_tile < q_tiles.end) { return; }
    q_tile = q_tiles.begin;
    if (++head < heads.end) { return; }
    head = heads.begin;
    batch++;
  }
};

// Sums the SIMD group's tile over its rows, and stores the sums in `sums`, [BLOCK_K].
METAL_FUNC void add_rows(thread const ScoreTile& tile, threadgroup float* sums, ushort row,
                         ushort column) {
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    Fragment<float> sum_over_rows = tile.fragments[0][j];
    UNROLL
    for (short i = 1; i < ROW_FRAGMENTS; i++) { sum_over_rows += tile.fragments[i][j]; }
    sum_over_rows = fragment_column_sum(sum_over_rows);
    if (row == 0) {
      threadgroup float* place = sums + j * FRAGMENT + column;
      place[0] = sum_over_rows.x;
      place[1] = sum_over_rows.y;
    }
  }
}

// The threadgroup's tile of the gradient, of one batch and head.
struct DbiasTile {
  device DBIAS_ELEMENT* first;  // element of the batch and head
  int first_query;              // of the lane's row fragment 0
  int first_key;

  // For shared queries. column_sums: sums over each SIMD group's rows, [SIMDGROUPS, BLOCK_K].
  METAL_FUNC void write_columns(const threadgroup float* column_sums,
                                constant FlashBwdBiasParams& params,
                                ushort thread_index) const thread {
    float total = 0.0f;
    if (KEYS_SHARED) {
      if (thread_index == 0) {
        for (int i = 0; i < COLUMN_SUMS; i++) { total += column_sums[i]; }
        first[0] = DBIAS_ELEMENT(total);
      }
    } else if (thread_index < BLOCK_K && first_key + thread_index < params.problem.kv_length) {
      UNROLL
      for (short i = 0; i < SIMDGROUPS; i++) { total += column_sums[i * BLOCK_K + thread_index]; }
      first[(first_key + thread_index) * params.dbias_strides.key] = DBIAS_ELEMENT(total);
    }
  }

  // For shared keys.
  METAL_FUNC void write_rows(thread const ScoreTile& tile, constant FlashBwdBiasParams& params,
                             ushort column) const thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      Fragment<float> sum_over_columns = tile.fragments[i][0];
      UNROLL
      for (short j = 1; j < KEY_FRAGMENTS; j++) { sum_over_columns += tile.fragments[i][j]; }
      const float total = fragment_row_sum(sum_over_columns.x + sum_over_columns.y);
      const int query = first_query + i * FRAGMENT;
      if (column == 0 && query < params.problem.q_length) {
        first[query * params.dbias_strides.query] = DBIAS_ELEMENT(total);
      }
    }
  }

  METAL_FUNC void write_elements(thread const ScoreTile& tile, constant FlashBwdBiasParams& params,
                                 ushort column) const thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const int query = first_query + i * FRAGMENT;
      if (query >= params.problem.q_length) { continue; }
      device DBIAS_ELEMENT* row = first + query * params.dbias_strides.query;
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const int key = first_key + column + j * FRAGMENT;
        const Fragment<float> value = tile.fragments[i][j];
        const bool exists = key < params.problem.kv_length;
        if (DBIAS_PAIRS && exists) {
          *reinterpret_cast<device Fragment<DBIAS_ELEMENT>*>(row + key) =
              Fragment<DBIAS_ELEMENT>(DBIAS_ELEMENT(value.x), DBIAS_ELEMENT(value.y));
        }
        if (!DBIAS_PAIRS && exists) { row[key] = DBIAS_ELEMENT(value.x); }
        if (!DBIAS_PAIRS && key + 1 < params.problem.kv_length) {
          row[key + 1] = DBIAS_ELEMENT(value.y);
        }
      }
    }
  }
};

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_bias(
    FLASH_BWD_PARAMETERS device DBIAS_ELEMENT* dbias [[buffer(FLASH_BWD_DBIAS)]],
    GRID_PARAMS(FlashBwdBiasParams, FLASH_PARAMS), GRID_POSITION, THREAD_INDICES) {
  SET_GRID_POSITION(FlashBwdBiasParams)
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  // [BLOCK_K / 2, Dv] pairs of keys
  UNLESS(TILES_SHARED, threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];)
  WHEN(TILES_SHARED, threadgroup uint4* const v_pairs = k_pairs;)
  THREADGROUP_ARRAY(QUERIES_SHARED, float, column_sums, COLUMN_SUMS)  // [SIMDGROUPS, BLOCK_K]

  FLASH_BWD_SET_INPUTS

  const int split = threadgroup_position.x % params.splits;
  const int own_kv_tile = threadgroup_position.x / params.splits;
  const int own_q_tile = threadgroup_position.y;
  const int own_head = threadgroup_position.z % params.own_heads;
  const int own_batch = threadgroup_position.z / params.own_heads;

  ScoreTiles walk;
  walk.batches = ScoreTiles::range(params.batches_shared, own_batch, problem.batch);
  walk.heads = ScoreTiles::range(params.heads_shared, own_head, params.heads);
  walk.q_tiles =
      ScoreTiles::range(QUERIES_SHARED, own_q_tile, (problem.q_length + BLOCK_Q - 1) / BLOCK_Q);
  walk.kv_tiles =
      ScoreTiles::range(KEYS_SHARED, own_kv_tile, (problem.kv_length + BLOCK_K - 1) / BLOCK_K);
  const int64_t first_tile = split * params.split_tiles;
  const int64_t last_tile = min(first_tile + params.split_tiles, params.shared_tiles);
  walk.seek(first_tile);

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const threadgroup Pair* k_lane = lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column);
  const threadgroup Pair* v_lane = lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column);

  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  OwnQueries queries;
  ScoreTile sum;
  sum.fill(0.0f);
  // Which tiles of K and V are staged, and which queries are loaded.
  int staged_batch = -1;
  int staged_kv_head = -1;
  int staged_kv_tile = -1;
  int loaded_batch = -1;
  int loaded_head = -1;
  int loaded_q_tile = -1;

  for (int64_t tile = first_tile; tile < last_tile; tile++, walk.advance()) {
    const int batch = walk.batch;
    const int head = walk.head;
    const int kv_head = head / problem.queries_per_kv;
    const Sequence sequence = inputs.sequence(batch, problem);
    if (sequence.impossible) {
      sum.fill(NAN);
      continue;
    }
    const int last_query = sequence.q_length - 1;
    const int tile_query = walk.q_tile * BLOCK_Q;
    const int block = walk.kv_tile * BLOCK_K;
    if (VARLEN && tile_query > last_query) { continue; }
    Visibility visible;
    visible.reset(sequence, problem);
    if (block >= visible.keys_of(min(tile_query + BLOCK_Q - 1, last_query)).end ||
        block + BLOCK_K <= visible.keys_of(tile_query).begin) {
      continue;
    }
    const Values values = inputs.values(batch, kv_head, sequence, problem);
    if (TILES_SHARED || batch != staged_batch || kv_head != staged_kv_head ||
        walk.kv_tile != staged_kv_tile) {
      // Wait until every SIMD group has read the previous tiles.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const Keys keys = inputs.keys(batch, kv_head, sequence, problem);
      stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
          k_pairs, keys, block, sequence.first_key, sequence.kv_length, thread_index);
      if (!TILES_SHARED) {
        stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
            v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
      }
      // Wait until the tiles are completely written.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      staged_batch = batch;
      staged_kv_head = kv_head;
      staged_kv_tile = walk.kv_tile;
    }

    const int simdgroup_query = tile_query + simdgroup * SIMDGROUP_ROWS;
    const int lane_query = simdgroup_query + row;
    SeenRows seen;
    seen.reset(visible, simdgroup_query, SIMDGROUP_ROWS, last_query);
    const bool any_seen = seen.any_in(block, BLOCK_K);
    if (any_seen &&
        (batch != loaded_batch || head != loaded_head || walk.q_tile != loaded_q_tile)) {
      queries.load(inputs, buffers, params, batch, head, sequence, lane_query, column);
      loaded_batch = batch;
      loaded_head = head;
      loaded_q_tile = walk.q_tile;
    }

    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    if (any_seen) { multiply_transposed<ELEMENT, QK_COLUMNS>(scores, queries.q_tile, k_lane); }
    if (TILES_SHARED) {
      // Wait until every SIMD group has read the keys.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
          v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (!any_seen) { continue; }
    ScoreRules<ROW_FRAGMENTS, false> rules;
    rules.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);
    rules.value(scores, block, true, inputs, problem);
    if (!seen.all_in(block, BLOCK_K)) { visible.apply<false>(scores, lane_query, block + column); }

    ScoreTile gradients;  // d loss / d weight, then d loss / d score: [ROW_FRAGMENTS * 8, BLOCK_K]
    multiply_transposed<ELEMENT, V_COLUMNS>(gradients, queries.dout_tile, v_lane);
    dropout.move_to(batch, head);
    dropout.apply(gradients,
                  dropout.kept<false, ROW_FRAGMENTS, KEY_FRAGMENTS>(lane_query, block + column));
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      // Row indices after the last query load the last query again; they must not be added.
      const bool exists = lane_query + i * FRAGMENT <= last_query;
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const Fragment<float> score = scores.fragments[i][j];
        Fragment<float> gradient = queries.differentiate(i, score, gradients.fragments[i][j]);
        if (ALIBI_SLOPE_GRADIENT) {
          const float distance = float(rules.distance - block) + float((i - j) * FRAGMENT);
          gradient *= -Fragment<float>(fabs(distance), fabs(distance - 1.0f));
        }
        // Masked keys add nothing, even if their values are NaN.
        sum.fragments[i][j] += Fragment<float>(exists && score.x != -INFINITY ? gradient.x : 0.0f,
                                               exists && score.y != -INFINITY ? gradient.y : 0.0f);
      }
    }
  }

  DbiasTile result;
  result.first = dbias + split * params.split_stride + own_batch * params.dbias_strides.batch +
                 own_head * params.dbias_strides.head;
  result.first_query = own_q_tile * BLOCK_Q + simdgroup * SIMDGROUP_ROWS + row;
  result.first_key = own_kv_tile * BLOCK_K;
  if (QUERIES_SHARED) {
    add_rows(sum, column_sums + simdgroup * BLOCK_K, row, column);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    result.write_columns(column_sums, params, thread_index);
  } else if (KEYS_SHARED) {
    result.write_rows(sum, params, column);
  } else {
    result.write_elements(sum, params, column);
  }
}
