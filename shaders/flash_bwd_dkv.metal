// Attention backward: the gradients of k and v, dv = weights^T dout and
// dk = scale * (weights * (dout v^T - delta))^T q, over every query head that shares the KV head.
//
// Dao, "FlashAttention-2" (2023), algorithm 2. A threadgroup owns BLOCK_K keys of one KV head and
// walks over the queries of all its heads, so that no other threadgroup writes its rows. Tiles are
// transposed: a row is a key and a column is a query.
//
// COLUMN_SIMDGROUPS SIMD groups share rows. Each computes a part of the tile of scores, over all
// columns, and a part of the columns of dk and dv. They exchange finished weights.
//
// If cores would be idle, HEAD_SPLITS threadgroups share the query heads of a KV head. They write
// parts of the gradients in float32, which flash_bwd_sum adds up.
#include "dkv.h"
#include "own_rows.h"

// The host defines what flash_fwd needs, and BLOCK_Q, the number of queries that are staged at a
// time; DK_SLICE and DV_SLICE, the columns of dk and dv that a threadgroup owns; SLICES, the number
// of slices; ROWS_IN_REGISTERS for k and v; NORMALISED; and HEAD_SPLITS if it is not 1.
constant constexpr int QUERY_FRAGMENTS = BLOCK_Q / FRAGMENT;
// A SIMD group's share of the scores: of the queries, and of the rows if queries are too few.
constant constexpr int QUERY_PARTS = query_parts(QUERY_FRAGMENTS, COLUMN_SIMDGROUPS);
constant constexpr int ROW_PARTS = COLUMN_SIMDGROUPS / QUERY_PARTS;
constant constexpr int OWN_QUERY_FRAGMENTS = QUERY_FRAGMENTS / QUERY_PARTS;
constant constexpr int OWN_ROW_FRAGMENTS = ROW_FRAGMENTS / ROW_PARTS;
constant constexpr int PARTS = SIMDGROUPS * OWN_ROW_FRAGMENTS * OWN_QUERY_FRAGMENTS * SIMD_LANES;
constant constexpr int DOUT_PAIRS_BYTES = BLOCK_Q * padded(V_COLUMNS) * sizeof(ELEMENT);
constant constexpr int Q_PAIRS_BYTES =
    with_shared(BLOCK_Q * padded(QK_COLUMNS) * sizeof(ELEMENT), DOUT_PAIRS_BYTES);
// SIMD groups that share rows read q and dout from the pairs. Other SIMD groups read more columns,
// so q and dout are staged a second time, as rows.
constant constexpr int Q_ROWS_BYTES =
    ROW_COPY_STAGED ? BLOCK_Q * padded(DK_SLICE) * sizeof(ELEMENT) : 0;
constant constexpr int DOUT_ROWS_BYTES =
    ROW_COPY_STAGED ? BLOCK_Q * padded(DV_SLICE) * sizeof(ELEMENT) : 0;
constant constexpr int STATISTICS_BYTES = (NORMALISED ? 3 : 2) * BLOCK_Q * sizeof(float);

static_assert(Q_PAIRS_BYTES + apart(DOUT_PAIRS_BYTES) + Q_ROWS_BYTES + DOUT_ROWS_BYTES +
                      STATISTICS_BYTES <=
                  THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");
static_assert(BLOCK_Q <= THREADS, "for each query, one thread stages the statistics");

using ScoreTile = RegisterTile<float, OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>;
using KeyTile = OwnRows<Keys, QK_COLUMNS, OWN_ROW_FRAGMENTS>;
using ValueTile = OwnRows<Values, V_COLUMNS, OWN_ROW_FRAGMENTS>;

// The statistics of a block's queries, in threadgroup memory.
struct BlockStatistics {
  threadgroup float* lse_log2s;
  threadgroup float* deltas;
  threadgroup float* weight_factors;  // NORMALISED
  int lane_query;                     // in the block, of the lane's column fragment 0

  METAL_FUNC void stage(thread const QueryStatistics& statistics, int block, int q_length,
                        ushort thread_index) const thread {
    if (thread_index >= BLOCK_Q) { return; }
    const int query = block + thread_index;
    const bool exists = query < q_length;
    lse_log2s[thread_index] = exists ? statistics.lse_log2(query) : INFINITY;
    deltas[thread_index] = exists ? statistics.delta_of(query) : 0.0f;
    if (NORMALISED) {
      weight_factors[thread_index] = exists ? statistics.weight_factor(query) : 1.0f;
    }
  }

  METAL_FUNC Fragment<float> pair(const threadgroup float* values, short j) const thread {
    const int query = lane_query + j * FRAGMENT;
    return Fragment<float>(values[query], values[query + 1]);
  }

  METAL_FUNC Fragment<float> lse_log2(short j) const thread { return pair(lse_log2s, j); }
  METAL_FUNC Fragment<float> delta(short j) const thread { return pair(deltas, j); }
  METAL_FUNC Fragment<float> weight_factor(short j) const thread { return pair(weight_factors, j); }
};

// Tiles of q and dout in threadgroup memory, and the parts of scores that SIMD groups exchange.
struct DkvTiles {
  const threadgroup uint4* q_pairs;
  const threadgroup uint4* dout_pairs;
  const threadgroup uint4* q_rows;
  const threadgroup uint4* dout_rows;
  threadgroup Fragment<float>* weight_parts;
  threadgroup Fragment<float>* gradient_parts;
};

// dk and dv of a SIMD group that owns all columns of the threadgroup's slice.
struct WholeColumns {
  const threadgroup Pair* q_rows;
  const threadgroup Pair* dout_rows;

  METAL_FUNC void reset(thread const DkvTiles& tiles, thread const DkvKeys&, ushort,
                        ushort lane) thread {
    const ushort row = fragment_row(lane);
    const ushort column = fragment_column(lane);
    q_rows = lane_of_rows<ELEMENT, DK_SLICE>(tiles.q_rows, row, column);
    dout_rows = lane_of_rows<ELEMENT, DV_SLICE>(tiles.dout_rows, row, column);
  }

  template <typename Weights>
  METAL_FUNC void add_dv(thread DvTile& dv_tile, thread const Weights& weights) const thread {
    accumulate<ELEMENT, DV_SLICE, OWN_DV_COLUMNS>(dv_tile, weights, dout_rows);
  }

  template <typename Gradients>
  METAL_FUNC void add_dk(thread DkTile& dk_tile, thread const Gradients& gradients) const thread {
    accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, gradients, q_rows);
  }

  METAL_FUNC void end_block(thread DkTile&, thread DvTile&, bool) const thread {}
};

// dk and dv of SIMD groups that share rows. They exchange parts of the scores, and each multiplies
// the whole tile of scores by its own columns.
struct SplitColumns {
  PairedRows<ELEMENT, QK_COLUMNS, SLICES * DK_SLICE == QK_COLUMNS> q_rows;
  PairedRows<ELEMENT, V_COLUMNS, SLICES * DV_SLICE == V_COLUMNS> dout_rows;
  threadgroup Fragment<float>* weight_parts;
  threadgroup Fragment<float>* gradient_parts;
  ushort simdgroup;
  ushort lane;

  METAL_FUNC void reset(thread const DkvTiles& tiles, thread const DkvKeys& keys,
                        ushort simdgroup_index, ushort lane_index) thread {
    simdgroup = simdgroup_index;
    lane = lane_index;
    weight_parts = tiles.weight_parts;
    gradient_parts = tiles.gradient_parts;
    const ushort row = fragment_row(lane);
    const ushort column = fragment_column(lane);
    q_rows = lane_of_paired_rows<ELEMENT, QK_COLUMNS, SLICES * DK_SLICE == QK_COLUMNS>(
        tiles.q_pairs, row, column, keys.slice * DK_SLICE + keys.part * OWN_DK_COLUMNS);
    dout_rows = lane_of_paired_rows<ELEMENT, V_COLUMNS, SLICES * DV_SLICE == V_COLUMNS>(
        tiles.dout_pairs, row, column, keys.slice * DV_SLICE + keys.part * OWN_DV_COLUMNS);
  }

  METAL_FUNC void add_dv(thread DvTile&, thread const ScoreTile& weights) const thread {
    store_part(weights, weight_parts, simdgroup, lane);
  }

  METAL_FUNC void add_dk(thread DkTile&, thread const ScoreTile& gradients) const thread {
    store_part(gradients, gradient_parts, simdgroup, lane);
  }

  METAL_FUNC void end_block(thread DkTile& dk_tile, thread DvTile& dv_tile,
                            bool seen) const thread {
    // Wait until all parts are written.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!seen) { return; }
    RegisterTile<float, ROW_FRAGMENTS, QUERY_FRAGMENTS> tile;  // [rows, BLOCK_Q]
    gather_parts<OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(tile, weight_parts, simdgroup, lane);
    accumulate<ELEMENT, DV_SLICE, OWN_DV_COLUMNS>(dv_tile, tile, dout_rows);
    // Keeps the compiler from loading both tiles at once, which takes too many registers.
    simdgroup_barrier(mem_flags::mem_none);
    gather_parts<OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(tile, gradient_parts, simdgroup, lane);
    accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, tile, q_rows);
  }
};

using Columns = conditional_t<COLUMNS_SPLIT, SplitColumns, WholeColumns>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_dkv(
    FLASH_BWD_PARAMETERS device Result* dk [[buffer(FLASH_BWD_DK)]],
    device Result* dv [[buffer(FLASH_BWD_DV)]], GRID_PARAMS(FlashBwdParams, FLASH_PARAMS),
    GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashBwdParams)
  threadgroup uint4 q_pairs[Q_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_Q / 2, D] pairs
  // [BLOCK_Q / 2, Dv] pairs
  UNLESS(TILES_SHARED, threadgroup uint4 dout_pairs[DOUT_PAIRS_BYTES / sizeof(uint4)];)
  WHEN(TILES_SHARED, threadgroup uint4* const dout_pairs = q_pairs;)
  // [BLOCK_Q, DK_SLICE] and [BLOCK_Q, DV_SLICE]
  THREADGROUP_ARRAY(ROW_COPY_STAGED, uint4, q_rows, Q_ROWS_BYTES / sizeof(uint4))
  THREADGROUP_ARRAY(ROW_COPY_STAGED, uint4, dout_rows, DOUT_ROWS_BYTES / sizeof(uint4))
  threadgroup float lse_log2s[BLOCK_Q];
  threadgroup float deltas[BLOCK_Q];
  THREADGROUP_ARRAY(ROWS_IN_THREADGROUP, uint4, k_chunks, SIMDGROUPS / QUERY_PARTS * KeyTile::SIZE)
  THREADGROUP_ARRAY(ROWS_IN_THREADGROUP, uint4, v_chunks,
                    SIMDGROUPS / QUERY_PARTS * ValueTile::SIZE)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, weight_parts, PARTS)
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, gradient_parts, PARTS)
  THREADGROUP_ARRAY(NORMALISED, float, weight_factors, BLOCK_Q)

  FLASH_BWD_SET_INPUTS

  DkvKeys keys;
  if (!keys.begin(inputs, dk, dv, params, threadgroup_position, threadgroups, thread_index,
                  simdgroup)) {
    return;
  }
  const int batch = keys.batch;
  const Sequence sequence = keys.sequence;
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  // The first query and key of the SIMD group's part of the scores.
  const int part_query = keys.part % QUERY_PARTS * OWN_QUERY_FRAGMENTS * FRAGMENT;
  const int part_key = keys.part / QUERY_PARTS * OWN_ROW_FRAGMENTS * FRAGMENT;
  const int lane_key = keys.first_key + part_key + row;

  const threadgroup Pair* q_lane =
      lane_of_pairs<ELEMENT, QK_COLUMNS>(q_pairs, row, part_query + column);
  const threadgroup Pair* dout_lane =
      lane_of_pairs<ELEMENT, V_COLUMNS>(dout_pairs, row, part_query + column);
  const DkvTiles tiles = {q_pairs, dout_pairs, q_rows, dout_rows, weight_parts, gradient_parts};
  Columns columns;
  columns.reset(tiles, keys, simdgroup, lane);
  const BlockStatistics block_statistics = {lse_log2s, deltas, weight_factors, part_query + column};

  KeyTile k_tile;    // [OWN_ROW_FRAGMENTS * 8, D]
  ValueTile v_tile;  // [OWN_ROW_FRAGMENTS * 8, Dv]
  k_tile.keep_in(k_chunks, simdgroup / QUERY_PARTS, lane);
  v_tile.keep_in(v_chunks, simdgroup / QUERY_PARTS, lane);
  // With ROWS_IN_THREADGROUP, one of the SIMD groups with the same keys stores them for all. The
  // barriers of staging follow.
  if (keys.has_keys && (!ROWS_IN_THREADGROUP || part_query == 0)) {
    k_tile.load(inputs.keys(batch, keys.kv_head, sequence, problem), lane_key, keys.last(), column);
    v_tile.load(inputs.values(batch, keys.kv_head, sequence, problem), lane_key, keys.last(),
                column);
  }
  DkTile dk_tile;
  DvTile dv_tile;
  dk_tile.fill(0.0f);
  dv_tile.fill(0.0f);
  Dropout dropout;
  dropout.reset(inputs.rng_state, problem);
  const Range query_range = keys.queries();

  // HEAD_SPLITS divides the query heads.
  const int members = problem.queries_per_kv / HEAD_SPLITS;
  for (int member = 0; member < members; member++) {
    const int head = keys.kv_head * problem.queries_per_kv + keys.split * members + member;
    const Queries queries = inputs.queries(batch, head, sequence, problem);
    const OutGradients out_gradients =
        buffers.out_gradients(params.dout_strides, batch, head, sequence);
    const QueryStatistics statistics =
        buffers.statistics(params.lse_strides, batch, head, sequence);
    Rules<OWN_ROW_FRAGMENTS, true> rules;
    rules.reset(inputs, batch, head, lane_key, column, keys.visible, sequence, problem);
    dropout.move_to(batch, head);
    Blocks<LIST_Q_BLOCK> blocks;
    blocks.reset(inputs, problem.flex, batch, head, keys.tile_key / LIST_KV_BLOCK, query_range);

    for (int block = blocks.first(); !blocks.done; block = blocks.next(block + BLOCK_Q)) {
      // Wait until every SIMD group has read the previous tiles.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_Q, QK_COLUMNS, THREADS, true>(q_pairs, queries, block, 0,
                                                               sequence.q_length, thread_index);
      if (!TILES_SHARED) {
        stage_pairs<ELEMENT, BLOCK_Q, V_COLUMNS, THREADS, true>(dout_pairs, out_gradients, block, 0,
                                                                sequence.q_length, thread_index);
      }
      if (ROW_COPY_STAGED) {
        stage_rows<ELEMENT, BLOCK_Q, DK_SLICE, THREADS, HEAD_DIM_QK, SLICES>(
            q_rows, queries, block, 0, sequence.q_length, keys.slice * DK_SLICE, thread_index);
        stage_rows<ELEMENT, BLOCK_Q, DV_SLICE, THREADS, HEAD_DIM_V, SLICES>(
            dout_rows, out_gradients, block, 0, sequence.q_length, keys.slice * DV_SLICE,
            thread_index);
      }
      block_statistics.stage(statistics, block, sequence.q_length, thread_index);
      // Wait until the tiles are completely written.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool seen = keys.seen.any_in(block, BLOCK_Q);
      const int lane_query = block + part_query + column;
      ScoreTile weights;  // scores, then weights: [keys, queries]
      ScoreTile slopes;
      uint kept = 0;
      if (seen) {
        multiply_transposed<ELEMENT, QK_COLUMNS>(weights, k_tile, q_lane);
        rules.value_and_slope(weights, slopes, block + part_query, blocks.masked, inputs, problem);
        keys.hide_unseen(weights, slopes, block, lane_key, lane_query);
        exponentiate(weights, block_statistics);
        ScoreTile dropped = weights;
        kept = dropout.kept<true, OWN_ROW_FRAGMENTS, OWN_QUERY_FRAGMENTS>(lane_key, lane_query);
        dropout.apply(dropped, kept);
        columns.add_dv(dv_tile, dropped);
      }
      if (TILES_SHARED) {
        // Wait until every SIMD group has read the queries.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_pairs<ELEMENT, BLOCK_Q, V_COLUMNS, THREADS, true>(dout_pairs, out_gradients, block, 0,
                                                                sequence.q_length, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (seen) {
        ScoreTile gradients;  // d loss / d weight, then d loss / d score
        multiply_transposed<ELEMENT, V_COLUMNS>(gradients, v_tile, dout_lane);
        dropout.apply(gradients, kept);
        differentiate(gradients, weights, block_statistics);
        if (SCORE_DERIVATIVES) { gradients.multiply(slopes); }
        columns.add_dk(dk_tile, gradients);
      }
      columns.end_block(dk_tile, dv_tile, seen);
    }
    if (blocks.impossible) {
      dk_tile.fill(NAN);
      dv_tile.fill(NAN);
    }
  }
  keys.write(dk_tile, dv_tile, row, column, problem);
}
