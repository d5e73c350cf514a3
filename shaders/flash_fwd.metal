// Attention forward: softmax(q k^T * scale) v, block by block over the keys.
//
// Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), algorithm 1.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, BLOCK_K at a time, staged
// in threadgroup memory. Each SIMD group owns ROW_FRAGMENTS x 8 queries, so that one K or V
// fragment serves that many matrix operations; scores and weights never leave its registers. Half
// and bfloat16 fragments feed the matrix unit as they are; weights stay float32.
#include "kv.h"
#include "mask.h"
#include "params.h"
#include "rotary.h"
#include "scores.h"
#include "sequence.h"
#include "softmax.h"
#include "tile.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, V_SLICE, ROW_FRAGMENTS,
// BLOCK_K, SIMDGROUPS, Q_IN_REGISTERS, WIDE_LOADS; and of the features that are on BAND, CHUNKED,
// VARLEN, SEQUSED_K, LEFTPAD_K, MASK, MASK_PAIRS, BIAS, BIAS_PAIRS, BIAS_ELEMENT, SOFTCAP, ALIBI,
// SINK, SINK_ELEMENT, Q_ROTARY, K_ROTARY, WIDE_ROTARY, ROTARY_ELEMENT, ROTARY_DIM and
// ROTARY_INTERLEAVED.
constant constexpr int QK_FRAGMENTS = (HEAD_DIM_QK + FRAGMENT - 1) / FRAGMENT;
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int V_SLICES = (HEAD_DIM_V + V_SLICE - 1) / V_SLICE;
constant constexpr int V_FRAGMENTS = V_SLICE / FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int CHAIN_FRAGMENTS = CHAIN_COLUMNS / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_TILE_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(ELEMENT);
constant constexpr int V_TILE_BYTES = BLOCK_K * padded(V_SLICE) * sizeof(ELEMENT);

static_assert(V_SLICE % FRAGMENT == 0, "a slice of V is a multiple of 8 columns");
static_assert(BLOCK_K % FRAGMENT == 0, "BLOCK_K is a multiple of 8");
static_assert(K_TILE_BYTES + V_TILE_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the K and V tiles fit in 32 KiB of threadgroup memory");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using OutTile = RegisterTile<float, ROW_FRAGMENTS, V_FRAGMENTS>;

// A SIMD group's queries, [ROW_FRAGMENTS * 8, D]: held in registers, or where those do not suffice
// read again for each block of keys.
struct QueryTile {
  // The row of each of the lane's fragments.
  const device ELEMENT* rows[ROW_FRAGMENTS];
  int lane_column;
#if Q_ROTARY
  int positions[ROW_FRAGMENTS];
  RotaryTables rotary;
#endif
#if Q_IN_REGISTERS
  RegisterTile<ELEMENT, ROW_FRAGMENTS, QK_FRAGMENTS> held;
#endif

  METAL_FUNC ELEMENT element(short i, int column) const thread {
    if (HEAD_DIM_QK % FRAGMENT != 0 && column >= HEAD_DIM_QK) {
      return ELEMENT(0);
    }
#if Q_ROTARY
    return rotary.turn(rows[i], positions[i], column);
#else
    return rows[i][column];
#endif
  }

  METAL_FUNC Pair read(short i, short d) const thread {
    const int column = lane_column + d * FRAGMENT;
    return Pair(element(i, column), element(i, column + 1));
  }

  // Queries past the end repeat the last one; what comes of them is not stored.
  METAL_FUNC void load(const device ELEMENT* q, int64_t row_stride, int column, int query,
                       int last_query) thread {
    lane_column = column;
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const int position = min(query + i * FRAGMENT, last_query);
      rows[i] = q + position * row_stride;
#if Q_ROTARY
      positions[i] = position;
#endif
#if Q_IN_REGISTERS
      UNROLL
      for (short d = 0; d < QK_FRAGMENTS; d++) {
        held.fragments[i][d] = read(i, d);
      }
#endif
    }
  }

  METAL_FUNC Pair fragment(short i, short d) const thread {
#if Q_IN_REGISTERS
    return held.fragments[i][d];
#else
    return read(i, d);
#endif
  }
};

// scores += q k^T over the columns of fragments [first, last). One K fragment serves every row
// fragment.
METAL_FUNC void multiply_q_k(thread ScoreTile& scores, thread const QueryTile& q,
                             const threadgroup Pair* k_lane, short first, short last) {
  UNROLL
  for (short d = first; d < last; d++) {
    Pair q_fragment[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      q_fragment[i] = q.fragment(i, d);
    }
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const Pair k_fragment = k_lane[j * FRAGMENT / 2 * padded(QK_COLUMNS) + d * FRAGMENT];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        mma<ELEMENT, ELEMENT>(scores.fragments[i][j], q_fragment[i], k_fragment);
      }
    }
  }
}

// o = o * corrections + weights v, a row fragment's correction being each lane's own row's. A
// block's products are summed by themselves first: the rounding error grows with the number of
// blocks, not of keys. One V fragment serves every row fragment.
METAL_FUNC void multiply_weights_v(thread OutTile& o, thread const float* corrections,
                                   thread const ScoreTile& weights,
                                   const threadgroup Pair* v_lane) {
  UNROLL
  for (short d = 0; d < V_FRAGMENTS; d++) {
    RegisterTile<float, ROW_FRAGMENTS, 1> block;
    block.fill(0.0f);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const Pair v_fragment =
          v_lane[(j * FRAGMENT * padded(V_SLICE) + d * FRAGMENT) / LANE_COLUMNS];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        mma<float, ELEMENT>(block.fragments[i][0], weights.fragments[i][j], v_fragment);
      }
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      o.fragments[i][d] = o.fragments[i][d] * corrections[i] + block.fragments[i][0];
    }
  }
}

// One (sequence, head)'s rows of the results, at the first column of a slice of V.
struct Results {
  device ELEMENT* out;
  device float* lse;
  int64_t out_stride;
  int64_t lse_stride;
  int columns;  // of the slice that exist
  bool has_lse;

  // Columns `column` and `column + 1` of a row.
  METAL_FUNC void store(int query, int column, Pair values) const thread {
    device ELEMENT* destination = out + query * out_stride + column;
#if HEAD_DIM_V % 2 == 0
    if (HEAD_DIM_V % V_SLICE == 0 || column < columns) {
      *reinterpret_cast<device Pair*>(destination) = values;
    }
#else
    if (column < columns) {
      destination[0] = values.x;
    }
    if (column + 1 < columns) {
      destination[1] = values.y;
    }
#endif
  }

  // Every row alike, by all threadgroups of the sequence.
  METAL_FUNC void fill(int rows, float value, float lse_value, int first, int step) const thread {
    for (int query = first; query < rows; query += step) {
      for (int column = 0; column < columns; column++) {
        out[query * out_stride + column] = ELEMENT(value);
      }
      if (has_lse) {
        lse[query * lse_stride] = lse_value;
      }
    }
  }
};

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd(
    const device ELEMENT* q [[buffer(FLASH_FWD_Q)]],
    const device ELEMENT* k [[buffer(FLASH_FWD_K)]],
    const device ELEMENT* v [[buffer(FLASH_FWD_V)]], device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]],
    constant FlashFwdParams& params [[buffer(FLASH_FWD_PARAMS)]],
#if VARLEN
    const device int* cu_seqlens_q [[buffer(FLASH_FWD_CU_SEQLENS_Q)]],
    const device int* cu_seqlens_k [[buffer(FLASH_FWD_CU_SEQLENS_K)]],
#endif
#if SEQUSED_K
    const device int* seqused_k [[buffer(FLASH_FWD_SEQUSED_K)]],
#endif
#if LEFTPAD_K
    const device int* leftpad_k [[buffer(FLASH_FWD_LEFTPAD_K)]],
#endif
#if MASK
    const device uchar* attn_mask [[buffer(FLASH_FWD_MASK)]],
#endif
#if BIAS
    const device BIAS_ELEMENT* attn_bias [[buffer(FLASH_FWD_BIAS)]],
#endif
#if ALIBI
    const device float* alibi_slopes [[buffer(FLASH_FWD_ALIBI_SLOPES)]],
#endif
#if SINK
    const device SINK_ELEMENT* learnable_sink [[buffer(FLASH_FWD_SINK)]],
#endif
#if Q_ROTARY
    const device ROTARY_ELEMENT* q_cos [[buffer(FLASH_FWD_Q_COS)]],
    const device ROTARY_ELEMENT* q_sin [[buffer(FLASH_FWD_Q_SIN)]],
#endif
#if K_ROTARY
    const device ROTARY_ELEMENT* k_cos [[buffer(FLASH_FWD_K_COS)]],
    const device ROTARY_ELEMENT* k_sin [[buffer(FLASH_FWD_K_SIN)]],
#endif
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 k_tile[K_TILE_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  threadgroup uint4 v_tile[V_TILE_BYTES / sizeof(uint4)];  // [BLOCK_K, V_SLICE]

  const int batch = threadgroup_position.z;
  const int head = threadgroup_position.y / V_SLICES;
  const int slice = threadgroup_position.y % V_SLICES;
  const int kv_head = head / params.queries_per_kv;
#if BAND
  // Later queries may see more keys: start the longest rows first.
  const int q_block = threadgroups.x - 1 - threadgroup_position.x;
#else
  const int q_block = threadgroup_position.x;
#endif

  Sequence sequence;
  sequence.reset(params);
#if VARLEN
  sequence.unpack(cu_seqlens_q, cu_seqlens_k, batch, params);
  const bool attends = batch < params.batch;
#else
  const bool attends = true;
#endif
#if LEFTPAD_K || SEQUSED_K
  if (attends) {
    const int keys = sequence.kv_length;
#if SEQUSED_K
    sequence.end_keys(seqused_k[batch]);
#endif
#if LEFTPAD_K
    sequence.begin_keys(leftpad_k[batch], keys);
#endif
  }
#endif

  Results results;
  results.out = out + batch * params.out_strides.batch + head * params.out_strides.head +
                sequence.q_start * params.out_strides.row + slice * V_SLICE;
  results.lse = softmax_lse + batch * params.lse_strides.batch + head * params.lse_strides.head +
                sequence.q_start * params.lse_strides.row;
  results.out_stride = params.out_strides.row;
  results.lse_stride = params.lse_strides.row;
  results.columns = min(V_SLICE, HEAD_DIM_V - slice * V_SLICE);
  results.has_lse = slice == 0;
#if VARLEN || SEQUSED_K || LEFTPAD_K
  if (sequence.impossible || !attends) {
    const bool impossible = sequence.impossible;
    results.fill(sequence.q_length, impossible ? NAN : 0.0f, impossible ? NAN : -INFINITY,
                 threadgroup_position.x * THREADS + thread_index, threadgroups.x * THREADS);
    return;
  }
#endif

  VisibleKeys visible;
  visible.reset(sequence, params);

  DenseKV<ELEMENT, HEAD_DIM_QK, HEAD_DIM_V> kv;
  kv.k = k + batch * params.k_strides.batch + kv_head * params.k_strides.head +
         sequence.kv_start * params.k_strides.row;
  kv.v = v + batch * params.v_strides.batch + kv_head * params.v_strides.head +
         sequence.kv_start * params.v_strides.row;
  kv.k_row_stride = params.k_strides.row;
  kv.v_row_stride = params.v_strides.row;
  kv.first = sequence.first_key;
  kv.length = sequence.kv_length;
#if K_ROTARY
  kv.rotary.cosines = k_cos + batch * params.k_cos_strides.batch;
  kv.rotary.sines = k_sin + batch * params.k_sin_strides.batch;
  kv.rotary.cosines_stride = params.k_cos_strides.row;
  kv.rotary.sines_stride = params.k_sin_strides.row;
#endif

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int last_query = sequence.q_length - 1;
  const int tile_query = q_block * BLOCK_Q;
#if VARLEN
  if (tile_query > last_query) {
    return;
  }
#endif
  const int simdgroup_query = tile_query + simdgroup * SIMDGROUP_ROWS;
  const int lane_query = simdgroup_query + row;

  // What any query of the SIMD group sees, and what all of them see.
  const KeyRange of_first = visible.of(simdgroup_query);
  const KeyRange of_last = visible.of(min(simdgroup_query + SIMDGROUP_ROWS - 1, last_query));
  const int seen_begin = of_first.begin;
  const int seen_end = simdgroup_query > last_query ? 0 : of_last.end;

  QueryTile q_tile;
#if Q_ROTARY
  q_tile.rotary.cosines = q_cos + batch * params.q_cos_strides.batch;
  q_tile.rotary.sines = q_sin + batch * params.q_sin_strides.batch;
  q_tile.rotary.cosines_stride = params.q_cos_strides.row;
  q_tile.rotary.sines_stride = params.q_sin_strides.row;
#endif
  q_tile.load(q + batch * params.q_strides.batch + head * params.q_strides.head +
                  sequence.q_start * params.q_strides.row,
              params.q_strides.row, column, lane_query, last_query);
  const threadgroup Pair* k_lane =
      reinterpret_cast<const threadgroup Pair*>(k_tile) + column / 2 * padded(QK_COLUMNS) + row;
  const threadgroup Pair* v_lane = reinterpret_cast<const threadgroup Pair*>(v_tile) +
                                   (row * padded(V_SLICE) + column) / LANE_COLUMNS;
#if MASK
  MaskRows<uchar, ROW_FRAGMENTS, MASK_PAIRS> mask;
  mask.reset(attn_mask + batch * params.mask_strides.batch + head * params.mask_strides.head,
             params.mask_strides, lane_query, last_query, params.kv_length);
#endif
#if BIAS
  MaskRows<BIAS_ELEMENT, ROW_FRAGMENTS, BIAS_PAIRS> bias;
  bias.reset(attn_bias + batch * params.bias_strides.batch + head * params.bias_strides.head,
             params.bias_strides, lane_query, last_query, params.kv_length);
#endif
#if ALIBI
  const float slope_log2 = alibi_slopes[batch * params.alibi_batch_stride + head] * M_LOG2E_F;
#endif

#if SINK
  const float sink_log2 = float(learnable_sink[head]) * M_LOG2E_F;
#endif

  OutTile o;  // [ROW_FRAGMENTS * 8, V_SLICE]
  o.fill(0.0f);
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
#if SINK
    softmax[i].reset(sink_log2);
#else
    softmax[i].reset();
#endif
  }

  // Blocks begin at multiples of BLOCK_K, the first of them where the tile's first query looks.
  const int kv_begin = visible.of(tile_query).begin / BLOCK_K * BLOCK_K;
  const int kv_end = visible.of(min(tile_query + BLOCK_Q - 1, last_query)).end;
  for (int kv_block = kv_begin; kv_block < kv_end; kv_block += BLOCK_K) {
    // Every SIMD group has read the tiles of the block before.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_k<ELEMENT, BLOCK_K, QK_COLUMNS, THREADS>(k_tile, kv, kv_block, thread_index);
    stage_v<ELEMENT, BLOCK_K, V_SLICE, THREADS>(v_tile, kv, kv_block, slice * V_SLICE,
                                                thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin) {
      continue;
    }

    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    scores.fill(0.0f);
    multiply_q_k(scores, q_tile, k_lane, 0, min(QK_FRAGMENTS, CHAIN_FRAGMENTS));
#if HEAD_DIM_QK > CHAIN_COLUMNS
    UNROLL
    for (short first = CHAIN_FRAGMENTS; first < QK_FRAGMENTS; first += CHAIN_FRAGMENTS) {
      ScoreTile chain;
      chain.fill(0.0f);
      multiply_q_k(chain, q_tile, k_lane, first, min(QK_FRAGMENTS, first + CHAIN_FRAGMENTS));
      scores.add(chain);
    }
#endif
#if SOFTCAP
    cap_scores(scores, params.scale_over_cap, params.cap_log2);
#else
    scores.scale(params.scale_log2);
#endif
#if ALIBI
    add_alibi(scores, slope_log2, float(lane_query + visible.q_offset - (kv_block + column)));
#endif
#if BIAS
    add_bias(scores, bias, kv_block + column);
#endif
#if MASK
    hide_masked(scores, mask, kv_block + column);
#endif
    if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end) {
      visible.apply(scores, lane_query, kv_block + column);
    }

    // From here on `scores` holds weights, exp(score - row_max).
    float corrections[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      corrections[i] = softmax[i].update<KEY_FRAGMENTS>(scores.fragments[i]);
    }
    multiply_weights_v(o, corrections, scores, v_lane);
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const float keys_sum = softmax[i].row_sum();
#if SINK
    const float row_sum = keys_sum + softmax[i].sink_weight(sink_log2);
#else
    const float row_sum = keys_sum;
#endif
    const int query = lane_query + i * FRAGMENT;
    if (query > last_query) {
      continue;
    }
    // A row that sees no key is 0, whatever hidden values its weights of 0 have met.
    const bool sees_nothing = keys_sum == 0.0f;
    const float normaliser = 1.0f / row_sum;
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      const Fragment<float> values =
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser;
      results.store(query, column + d * FRAGMENT, Pair(ELEMENT(values.x), ELEMENT(values.y)));
    }
    if (column == 0 && results.has_lse) {
      results.lse[query * results.lse_stride] = softmax[i].logsumexp(row_sum);
    }
  }
}
