// Attention backward: the gradient of a captured tensor of score_mod. For each score,
// weight * (dout v^T - delta) * FLEX_SHARE is added to the element FLEX_PLACE. FLEX_SHARE is the
// derivative of the modified score by the element (flex.h).
//
// A threadgroup walks over tiles of queries as flash_bwd_dq does. Each SIMD group adds to its own
// copy of the tensor. With QUERIES_OWNED the SIMD groups of a threadgroup use different elements,
// so they share a copy. The copies are added up afterwards, in a fixed order without atomics.
#include "blocks.h"
#include "flex.h"
#include "score_gradients.h"

// The host defines the macros of flash_bwd_bias, and FLEX. QUERIES_OWNED: no two queries use the
// same element. PLACES_DIFFER: no two (query, key) pairs use the same element.
static_assert(K_PAIRS_BYTES + apart(V_PAIRS_BYTES) <= THREADGROUP_MEMORY_BYTES,
              "the tiles fit in 32 KiB of threadgroup memory");

// Adds to the SIMD group's copy of the captured tensor. A lane first sums values for one element.
struct OrderedSums {
  device float* copy;
  int place;  // the element that `sum` goes to; INT_MAX if there is no sum
  float sum;

  METAL_FUNC void reset(device float* own_copy) thread {
    copy = own_copy;
    place = INT_MAX;
    sum = 0.0f;
  }

  // All lanes call it. Nothing is added unless the value `exists`.
  METAL_FUNC void add(bool exists, int new_place, float value, ushort lane) thread {
    const bool leaves = exists && place != INT_MAX && place != new_place;
    if (simd_max(leaves ? 1.0f : 0.0f) > 0.0f) { flush(lane); }
    if (exists) {
      place = new_place;
      sum += value;
    }
  }

  METAL_FUNC void flush(ushort lane) thread {
    if (PLACES_DIFFER && place != INT_MAX) { copy[place] += sum; }
    // Without PLACES_DIFFER lane 0 adds all sums, element by element, so the order is fixed.
    for (int lowest = PLACES_DIFFER ? INT_MAX : simd_min(place); lowest != INT_MAX;
         lowest = simd_min(place)) {
      const bool is_lowest = place == lowest;
      const float total = simd_sum(is_lowest ? sum : 0.0f);
      if (lane == 0) { copy[lowest] += total; }
      place = is_lowest ? INT_MAX : place;
    }
    place = INT_MAX;
    sum = 0.0f;
  }
};

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_captures(
    FLASH_BWD_PARAMETERS device float* copies [[buffer(FLASH_BWD_DBIAS)]],
    GRID_PARAMS(FlashBwdCaptureParams, FLASH_PARAMS), GRID_POSITION, THREAD_INDICES) {
  SET_GRID_POSITION(FlashBwdCaptureParams)
  threadgroup uint4 k_pairs[K_PAIRS_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  // [BLOCK_K / 2, Dv] values of pairs of keys
  UNLESS(TILES_SHARED, threadgroup uint4 v_pairs[V_PAIRS_BYTES / sizeof(uint4)];)
  WHEN(TILES_SHARED, threadgroup uint4* const v_pairs = k_pairs;)

  FLASH_BWD_SET_INPUTS

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const threadgroup Pair* k_lane = lane_of_pairs<ELEMENT, QK_COLUMNS>(k_pairs, row, column);
  const threadgroup Pair* v_lane = lane_of_pairs<ELEMENT, V_COLUMNS>(v_pairs, row, column);

  const int64_t split = threadgroup_position.x;
  const int64_t own_copy = QUERIES_OWNED ? split : split * SIMDGROUPS + simdgroup;
  OrderedSums sums;
  sums.reset(copies + own_copy * params.elements);

  const int64_t first_tile = split * params.split_tiles;
  const int64_t last_tile = min(first_tile + params.split_tiles, params.shared_tiles);
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    int64_t owned = threadgroup_position.y;
    int64_t shared = tile;
    const int tile_query = pop_dimension(QUERIES_OWNED ? owned : shared, params.q_tiles) * BLOCK_Q;
    const int head = params.heads_owned ? pop_dimension(owned, params.heads)
                                        : pop_dimension(shared, params.heads);
    const int batch = int(params.batches_owned ? owned : shared);
    const int kv_head = head / problem.queries_per_kv;
    const Sequence sequence = inputs.sequence(batch, problem);
    const int last_query = sequence.q_length - 1;
    const int simdgroup_query = tile_query + simdgroup * SIMDGROUP_ROWS;
    const int lane_query = simdgroup_query + row;
    Visibility visible;
    visible.reset(sequence, problem);

    OwnQueries queries;
    queries.load(inputs, buffers, params, batch, head, sequence, lane_query, column);
    FlexRules<ROW_FRAGMENTS, false> flex;
    flex.reset(inputs, batch, head, lane_query, column, visible, sequence, problem);
    const Keys keys = inputs.keys(batch, kv_head, sequence, problem);
    const Values values = inputs.values(batch, kv_head, sequence, problem);
    Blocks<LIST_KV_BLOCK> blocks;
    const Range existing = {0, sequence.kv_length};
    blocks.reset(inputs, problem.flex, batch, head, tile_query / LIST_Q_BLOCK, existing);
    for (int block = blocks.first(); !blocks.done; block = blocks.next(block + BLOCK_K)) {
      // Wait until every SIMD group has read the previous tiles.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_pairs<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS, true>(
          k_pairs, keys, block, sequence.first_key, sequence.kv_length, thread_index);
      if (!TILES_SHARED) {
        stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
            v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
      }
      // Wait until the tiles are completely written.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      ScoreTile products;  // [ROW_FRAGMENTS * 8, BLOCK_K]
      if (simdgroup_query <= last_query) {
        multiply_transposed<ELEMENT, QK_COLUMNS>(products, queries.q_tile, k_lane);
      }
      if (TILES_SHARED) {
        // Wait until every SIMD group has read the keys.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_pairs<ELEMENT, BLOCK_K, V_COLUMNS, THREADS, true>(
            v_pairs, values, block, sequence.first_key, sequence.kv_length, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (simdgroup_query > last_query) { continue; }
      ScoreTile scores = products;
      ScoreTile slopes;
      flex.value_and_slope(scores, slopes, block, blocks.masked, inputs, problem);
      visible.apply<false>(scores, lane_query, block + column);
      ScoreTile gradients;  // d loss / d weight: [ROW_FRAGMENTS * 8, BLOCK_K]
      multiply_transposed<ELEMENT, V_COLUMNS>(gradients, queries.dout_tile, v_lane);
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        // Row indices after the last query load the last query again; they must not be added.
        const bool exists = lane_query + i * FRAGMENT <= last_query;
        UNROLL
        for (short j = 0; j < KEY_FRAGMENTS; j++) {
          const Fragment<float> score = scores.fragments[i][j];
          const Fragment<float> product = products.fragments[i][j];
          const Fragment<float> gradient =
              queries.differentiate(i, score, gradients.fragments[i][j]);
          const int key = block + column + j * FRAGMENT;
          float share;
          int place = flex.place(product.x, i, key, inputs, problem, share);
          sums.add(exists && score.x != -INFINITY && place < params.elements, place,
                   gradient.x * share, lane);
          place = flex.place(product.y, i, key + 1, inputs, problem, share);
          sums.add(exists && score.y != -INFINITY && place < params.elements, place,
                   gradient.y * share, lane);
        }
      }
      sums.flush(lane);
    }
  }
}
