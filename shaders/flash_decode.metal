// Attention of few queries over many keys, which are split over the grid.
//
// Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023).
//
// Bound by memory, so each row of k and v is read once: the queries of all heads that share a KV
// head are rows of one tile, [ROWS, D]. Nothing of k and v is staged: lanes load them straight into
// fragments (spans.h). Scores are computed transposed, keys by queries, so that k and v are read
// alike, and transposed back in threadgroup memory.
//
// KEY_SIMDGROUPS walk over different keys and join their states at the end. Where a tile's
// registers are too many for one SIMD group, COLUMN_SIMDGROUPS share the same keys instead: each
// has its spans of q, k, v and out, and they add up their parts of the scores.
#include "blocks.h"
#include "cache_write.h"
#include "decode_tile.h"
#include "decode_vector.h"
#include "flex.h"
#include "output.h"
#include "softmax.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, ROW_FRAGMENTS,
// KEY_FRAGMENTS, KEY_SIMDGROUPS, COLUMN_SIMDGROUPS, WIDE_LOADS; SPLIT if there is more than one
// split, V_IN_K if v is the first columns of k, or V_FIRST to load v before the scores; the
// features of flash_fwd but DROPOUT and K_ROTARY, or FLEX; and to append new keys first APPEND,
// WIDE_STORES and NEW_K_ROTARY.

// scores = products^T, through the SIMD group's tile in threadgroup memory; where SIMD groups split
// the columns, summed over them.
METAL_FUNC void transpose_scores(thread ScoreRow* scores, thread const ProductTile& products,
                                 threadgroup float* tiles, ushort simdgroup, ushort lane) {
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  threadgroup float* tile = tiles + simdgroup * SCORE_TILE;
  if (COLUMN_SIMDGROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL
  for (short j = 0; j < KEY_FRAGMENTS; j++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      threadgroup float* place = tile + (i * FRAGMENT + column) * SCORE_STRIDE + j * FRAGMENT + row;
      place[0] = products.fragments[j][i].x;
      place[SCORE_STRIDE] = products.fragments[j][i].y;
    }
  }
  if (COLUMN_SIMDGROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup float* sums = tiles + SIMDGROUPS * SCORE_TILE;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = simdgroup * SIMD_LANES + lane; n < ROWS * BLOCK_K; n += THREADS) {
      const int place = n / BLOCK_K * SCORE_STRIDE + n % BLOCK_K;
      float sum = 0.0f;
      UNROLL
      for (short part = 0; part < COLUMN_SIMDGROUPS; part++) {
        sum += tiles[part * SCORE_TILE + place];
      }
      sums[place] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile = sums;
  }
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      scores[i].fragments[0][j] = *reinterpret_cast<threadgroup Fragment<float>*>(
          tile + (i * FRAGMENT + row) * SCORE_STRIDE + j * FRAGMENT + column);
    }
  }
}

// Gives each SIMD group the fragments of q that others have loaded.
METAL_FUNC void share(thread QueryTile& q_tile, threadgroup Fragment<ELEMENT>* pairs,
                      int key_simdgroup, ushort lane) {
  if (KEY_SIMDGROUPS == 1) {
    return;
  }
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (n % KEY_SIMDGROUPS == key_simdgroup) {
        pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane] = q_tile.fragments[n][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      q_tile.fragments[n][i] = pairs[(n * ROW_FRAGMENTS + i) * SIMD_LANES + lane];
    }
  }
}

// Adds up out over the SIMD groups that walked over different keys, in the first of them.
METAL_FUNC void sum_out(thread OutTile& o, threadgroup Fragment<float>* tile, ushort simdgroup,
                        ushort lane) {
  UNROLL
  for (short giver = KEY_SIMDGROUPS - 1; giver >= 0; giver--) {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      UNROLL
      for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
        threadgroup Fragment<float>& sum = tile[(i * OWN_V_FRAGMENTS + d) * SIMD_LANES + lane];
        if (simdgroup == giver && giver < KEY_SIMDGROUPS - 1) {
          o.fragments[i][d] += sum;
        }
        if (simdgroup == giver && giver > 0) {
          sum = o.fragments[i][d];
        }
      }
    }
    if (giver > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

#if APPEND

// Writes the new rows of one (sequence, KV head) after its `length` keys.
METAL_FUNC void append(thread const FlashInputs& inputs, const device ELEMENT* new_k,
                       const device ELEMENT* new_v, int length, int batch, int kv_head,
                       int thread_index, constant AppendParams& params) {
  AppendBuffers buffers;
  buffers.k = new_k;
  buffers.v = new_v;
  buffers.k_cache = inputs.k;
  buffers.v_cache = inputs.v;
#if K_SCALE
  buffers.k_scale = inputs.k_scale;
#endif
#if V_SCALE
  buffers.v_scale = inputs.v_scale;
#endif
  AppendPlace place;
  place.first = length;
  place.first_rotary = length;
#if LEFTPAD_K
  place.first_rotary -= params.rotary_from_leftpad != 0 ? inputs.leftpad_k[batch] : 0;
#endif
#if NEW_K_ROTARY
  buffers.cos_table = inputs.q_cos;
  buffers.sin_table = inputs.q_sin;
#endif
#if PAGE_SIZE
  place.block_table = inputs.block_table + batch * params.block_table_stride;
#elif CACHE_BATCH_IDX
  place.cache_batch = inputs.cache_batch_idx[batch];
#else
  place.cache_batch = batch;
#endif
  append_rows(buffers, place, batch, kv_head, 0, params.length, thread_index, THREADS, params);
}
#endif

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_decode(
    FLASH_PARAMETERS
#if APPEND
    const device ELEMENT* new_k [[buffer(FLASH_DECODE_NEW_K)]],
    const device ELEMENT* new_v [[buffer(FLASH_DECODE_NEW_V)]],
#endif
    device Result* out [[buffer(FLASH_DECODE_OUT)]],
    device float* softmax_lse [[buffer(FLASH_DECODE_LSE)]],
    constant FlashDecodeParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float score_tiles[SCORES];               // [SCORE_TILES, ROWS, BLOCK_K]
  threadgroup float weight_tiles[WEIGHTS];             // [SIMDGROUPS, BLOCK_K + 1, ROWS]
  threadgroup Fragment<float> out_tile[OUT_PAIRS];     // [ROWS, Dv]
  threadgroup Fragment<ELEMENT> q_pairs[QUERY_PAIRS];  // [D, ROWS]
  threadgroup float2 states[STATES];  // [KEY_SIMDGROUPS, ROWS] of row_max and row_sum

  FlashInputs inputs;
  FLASH_SET_INPUTS
  constant FlashParams& problem = params.problem;
  const int split = threadgroup_position.x;
  const int splits = threadgroups.x;
  const int kv_head = int(threadgroup_position.y) / params.row_groups;
  const int row_group = int(threadgroup_position.y) % params.row_groups;
  const int batch = threadgroup_position.z;
  device Result* split_out = out + split * params.out_split_stride;
  device float* split_lse =
      softmax_lse + batch * params.lse_strides.batch + split * params.lse_split_stride;

  Sequence sequence = inputs.sequence(batch, problem);
#if APPEND
  const int old_length = inputs.seqused_k[batch];
  // The other splits only read keys that were there before.
  if (split == splits - 1) {
    append(inputs, new_k, new_v, old_length, batch, kv_head, thread_index, params.append);
    threadgroup_barrier(mem_flags::mem_device);
  }
#if Q_ROTARY
  const int64_t first_rotary =
      int64_t(old_length) - (params.append.rotary_from_leftpad != 0 ? sequence.first_key : 0);
  const int rotary_rows = params.q_advances != 0 ? problem.q_length : 1;
  sequence.impossible = sequence.impossible || first_rotary < 0 ||
                        first_rotary + rotary_rows > params.append.table_rows;
#endif
#endif
  const int rows = problem.q_length * problem.queries_per_kv;
#if SEQUSED_K || LEFTPAD_K || CACHE_BATCH_IDX
  if (sequence.impossible) {
    const int step = params.row_groups * THREADS;
    for (int n = row_group * THREADS + thread_index; n < rows; n += step) {
      TileRow own;
      own.reset(n, kv_head, problem);
      OutRow out_row;
      out_row.reset(split_out, params.out_strides, batch, own.head, 0, 0);
      out_row.fill(NAN, own.query, own.query + 1, 1);
      split_lse[own.head * params.lse_strides.head + own.query * params.lse_strides.row] = NAN;
    }
    return;
  }
#endif

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int unit_column = first_unit_column(column);
  const int key_simdgroup = simdgroup / COLUMN_SIMDGROUPS;
  const int first_span = simdgroup % COLUMN_SIMDGROUPS;

  // Each split has its share of the steps over keys that any query sees. The last one has all steps
  // with new keys, and it alone writes them.
  Visibility visible;
  visible.reset(sequence, problem);
#if BLOCK_LISTS
  // One list for all rows: steps are counted along its blocks.
  ListedBlocks<LIST_KV_BLOCK> listed;
  listed.reset(inputs, problem.flex, batch, kv_head * problem.queries_per_kv, 0,
               sequence.kv_length);
  const int begin = 0;
  const int end = listed.count * LIST_KV_BLOCK;
#else
  const int begin = visible.keys_of(0).begin / FRAGMENT * FRAGMENT;
  const int end = visible.keys_of(problem.q_length - 1).end;
#endif
#if APPEND
  const int shared_steps = max(old_length - begin, 0) / STEP_K;
#else
  const int shared_steps = (max(end - begin, 0) + STEP_K - 1) / STEP_K;
#endif
  const int split_steps = (shared_steps + splits - 1) / splits;
  const int kv_begin = begin + min(split * split_steps, shared_steps) * STEP_K;
  const int shared_end = begin + min((split + 1) * split_steps, shared_steps) * STEP_K;
  const int kv_end = split == splits - 1 ? end : min(end, shared_end);
  Keys keys = inputs.keys(batch, kv_head, sequence, problem);
  Values values = inputs.values(batch, kv_head, sequence, problem);

  // With new keys there is one row group, whose threadgroups alone see them written.
  for (int first_row = row_group * ROWS; first_row < rows; first_row += params.row_groups * ROWS) {
    QueryTile q_tile;  // [D, ROWS]
    TileRow own[ROW_FRAGMENTS];
    Rules<1, false> rules[ROW_FRAGMENTS];
    OnlineSoftmax softmax[ROW_FRAGMENTS];
#if VECTOR_ROWS
    VectorOut o;
    threadgroup float* weights = weight_tiles + simdgroup * SIMDGROUP_WEIGHTS;
#else
    OutTile o;  // [ROWS, Dv]
#endif
    o.fill(0.0f);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      softmax[i].reset();
      own[i].reset(first_row + min(i * FRAGMENT + row, ROWS - 1), kv_head, problem);
      rules[i].reset(inputs, batch, own[i].head, own[i].query, column, visible, sequence, problem);
      UNROLL
      for (short e = 0; e < LANE_COLUMNS; e++) {
        TileRow other;
        other.reset(first_row + i * FRAGMENT + column + e, kv_head, problem);
        Queries queries = inputs.queries(batch, other.head, sequence, problem);
#if APPEND && Q_ROTARY
        queries.rotary.start_at(first_rotary, params.q_advances != 0);
#endif
        UNROLL
        for (short n = 0; n < OWN_QK_SPANS * SPAN_FRAGMENTS; n++) {
          const int span = first_span + n / SPAN_FRAGMENTS * COLUMN_SIMDGROUPS;
          const int d = span * SPAN_COLUMNS + span_column(row, n % SPAN_FRAGMENTS);
          // SIMD groups that have the same columns load, and rotate, a share each.
          if (n % KEY_SIMDGROUPS == key_simdgroup) {
            q_tile.fragments[n][i][e] =
                d < HEAD_DIM_QK ? queries.element(other.query, d) : ELEMENT(0);
          }
        }
      }
    }
    share(q_tile, q_pairs, key_simdgroup, lane);
    // What the tile's first row sees, and its last.
    const int last_row = min(first_row + ROWS, rows) - 1;
    const Range of_first = visible.keys_of(first_row / problem.queries_per_kv);
    const Range of_last = visible.keys_of(last_row / problem.queries_per_kv);

    for (int step = kv_begin + key_simdgroup * BLOCK_K; step < kv_end; step += STEP_K) {
#if BLOCK_LISTS
      const int kv_block = listed.row_at(step);
      if (kv_block >= sequence.kv_length) {
        continue;
      }
#else
      const int kv_block = step;
#endif
      BlockKeys block;
      move_to(keys, values, kv_block, BLOCK_K, lane);
      block.reset(keys, values, kv_block + row, sequence);
#if VECTOR_ROWS
      VectorValues block_values;
#if V_FIRST
      block_values.load(values, kv_block, sequence, lane);
#endif
#elif V_FIRST
      // Before the scores, so that a block waits for memory once and not twice.
      UNROLL
      for (short s = 0; s < OWN_V_SPANS; s++) {
        const int span = first_span + s * COLUMN_SIMDGROUPS;
        if (V_SPANS % COLUMN_SIMDGROUPS == 0 || span < V_SPANS) {
          block.load_values(s, span, values, unit_column);
        }
      }
#endif
      ProductTile products;  // [BLOCK_K, ROWS]
      block.multiply(products, q_tile, keys, first_span, unit_column);
      ScoreRow scores[ROW_FRAGMENTS];  // [8, BLOCK_K] each
      transpose_scores(scores, products, score_tiles, simdgroup, lane);

      // From here on `scores` holds weights, exp(score - row_max).
      const bool hides = kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end;
      float corrections[ROW_FRAGMENTS];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        rules[i].value(scores[i], kv_block, BLOCK_MASKED, inputs, problem);
        if (hides) {
          visible.apply<false>(scores[i], own[i].query, kv_block + column);
        }
        corrections[i] = softmax[i].update<KEY_FRAGMENTS>(scores[i].fragments[0]);
      }
#if VECTOR_ROWS
      if (row < ROWS) {
        UNROLL
        for (short j = 0; j < KEY_FRAGMENTS; j++) {
          threadgroup float* place = weights + (j * FRAGMENT + column) * ROWS + row;
          place[0] = scores[0].fragments[0][j].x;
          place[ROWS] = scores[0].fragments[0][j].y;
        }
        if (column == 0) {
          weights[BLOCK_K * ROWS + row] = corrections[0];
        }
      }
#if !V_FIRST
      block_values.load(values, kv_block, sequence, lane);
#endif
      simdgroup_barrier(mem_flags::mem_threadgroup);
      block_values.accumulate(o, weights, lane);
#else
      block.accumulate(o, corrections, scores, values, first_span, unit_column, column);
#endif
    }

#if VECTOR_ROWS
    // Where the last block's scores were, which all lanes have read.
    threadgroup float* shares = score_tiles + simdgroup * SCORE_TILE;
#endif
    float row_sums[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
#if BLOCK_LISTS
      row_sums[i] = listed.impossible ? NAN : softmax[i].row_sum();
#else
      row_sums[i] = softmax[i].row_sum();
#endif
      if (KEY_SIMDGROUPS > 1 && column == 0 && i * FRAGMENT + row < ROWS) {
        states[simdgroup * ROWS + i * FRAGMENT + row] = float2(softmax[i].row_max, row_sums[i]);
      }
    }
    if (KEY_SIMDGROUPS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      OnlineSoftmax total = softmax[i];
      float total_sum = row_sums[i];
      if (KEY_SIMDGROUPS > 1) {
        const threadgroup float2* row_states = states + min(i * FRAGMENT + row, ROWS - 1);
        UNROLL
        for (short n = 0; n < KEY_SIMDGROUPS; n++) {
          total.row_max = max(total.row_max, row_states[n * ROWS].x);
        }
        total_sum = 0.0f;
        UNROLL
        for (short n = 0; n < KEY_SIMDGROUPS; n++) {
          const float2 state = row_states[n * ROWS];
          total_sum += state.y * fast::exp2(state.x - total.row_max);
        }
      }
#if SINK && !SPLIT
      // Splits leave it to their merging, which counts it once.
      const float keys_max = total.row_max;
      total.row_max = max(keys_max, inputs.sink_log2(own[i].head));
      total_sum = total_sum * fast::exp2(keys_max - total.row_max) +
                  inputs.sink_weight(own[i].head, total.row_max);
#endif
      // A row that sees no key is 0, even if masked values are NaN and 0 * NaN was added.
      const bool sees_nothing = row_sums[i] == 0.0f;
      const float share = fast::exp2(softmax[i].row_max - total.row_max) / total_sum;
#if VECTOR_ROWS
      if (column == 0 && row < ROWS) {
        shares[row] = sees_nothing ? -1.0f : share;
      }
#else
      UNROLL
      for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
        o.fragments[i][d] = sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * share;
      }
#endif
      if (simdgroup == 0 && column == 0 && i * FRAGMENT + row < ROWS &&
          first_row + i * FRAGMENT + row < rows) {
        split_lse[own[i].head * params.lse_strides.head + own[i].query * params.lse_strides.row] =
            total.logsumexp(total_sum);
      }
    }
#if VECTOR_ROWS
    simdgroup_barrier(mem_flags::mem_threadgroup);
    o.store(reinterpret_cast<threadgroup float*>(out_tile) + simdgroup * ROWS * V_PADDED, shares,
            lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    constexpr int PAIRS = V_PADDED / LANE_COLUMNS;  // of a row
    for (int n = thread_index; n < ROWS * PAIRS; n += THREADS) {
      if (first_row + n / PAIRS < rows) {
        Fragment<float> sum = out_tile[n];
        UNROLL
        for (short part = 1; part < SIMDGROUPS; part++) {
          sum += out_tile[part * ROWS * PAIRS + n];
        }
        TileRow one;
        one.reset(first_row + n / PAIRS, kv_head, problem);
        OutRow out_row;
        out_row.reset(split_out, params.out_strides, batch, one.head, 0, 0);
        out_row.store(one.query, n % PAIRS * LANE_COLUMNS, sum);
      }
    }
#else
    sum_out(o, out_tile, simdgroup, lane);
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (key_simdgroup == 0 && first_row + i * FRAGMENT + row < rows) {
        OutRow out_row;
        out_row.reset(split_out, params.out_strides, batch, own[i].head, 0, 0);
        UNROLL
        for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
          const int span = first_span + d / SPAN_FRAGMENTS * COLUMN_SIMDGROUPS;
          if (V_SPANS % COLUMN_SIMDGROUPS == 0 || span < V_SPANS) {
            out_row.store(own[i].query,
                          span * SPAN_COLUMNS + unit_column + d % SPAN_FRAGMENTS * LANE_COLUMNS,
                          o.fragments[i][d]);
          }
        }
      }
    }
#endif
  }
}
