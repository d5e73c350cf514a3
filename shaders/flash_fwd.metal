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
#include "softmax.h"
#include "tile.h"

// The specialisation, given by the host: ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, ROW_FRAGMENTS, BLOCK_K,
// SIMDGROUPS, Q_IN_REGISTERS, CAUSAL, WIDE_LOADS.
constant constexpr int QK_FRAGMENTS = HEAD_DIM_QK / FRAGMENT;
constant constexpr int V_FRAGMENTS = HEAD_DIM_V / FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
constant constexpr int CHAIN_FRAGMENTS =
    QK_FRAGMENTS < CHAIN_COLUMNS / FRAGMENT ? QK_FRAGMENTS : CHAIN_COLUMNS / FRAGMENT;
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_TILE_BYTES = BLOCK_K * padded(HEAD_DIM_QK) * sizeof(ELEMENT);
constant constexpr int V_TILE_BYTES = BLOCK_K * padded(HEAD_DIM_V) * sizeof(ELEMENT);

static_assert(HEAD_DIM_QK % FRAGMENT == 0 && HEAD_DIM_V % FRAGMENT == 0,
              "head dims are multiples of 8");
static_assert(BLOCK_K % FRAGMENT == 0, "BLOCK_K is a multiple of 8");
static_assert(K_TILE_BYTES + V_TILE_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the K and V tiles fit in 32 KiB of threadgroup memory");

using Pair = Fragment<ELEMENT>;
using ScoreTile = RegisterTile<float, ROW_FRAGMENTS, KEY_FRAGMENTS>;
using OutTile = RegisterTile<float, ROW_FRAGMENTS, V_FRAGMENTS>;

// A SIMD group's queries, [ROW_FRAGMENTS * 8, D]: held in registers, or where those do not suffice
// read again for each block of keys.
struct QueryTile {
  // The lane's row of each fragment, at its first column.
  const device ELEMENT* rows[ROW_FRAGMENTS];
#if Q_IN_REGISTERS
  RegisterTile<ELEMENT, ROW_FRAGMENTS, QK_FRAGMENTS> held;
#endif

  METAL_FUNC Pair read(short i, short d) const thread {
    return Pair(rows[i][d * FRAGMENT], rows[i][d * FRAGMENT + 1]);
  }

  // Queries past the end repeat the last one; what comes of them is not stored.
  METAL_FUNC void load(const device ELEMENT* q_lane, int64_t row_stride, int query,
                       int last_query) thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      rows[i] = q_lane + min(query + i * FRAGMENT, last_query) * row_stride;
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

// scores += q k^T over the columns of fragments [FIRST, LAST). One K fragment serves every row
// fragment.
template <int FIRST, int LAST>
METAL_FUNC void multiply_q_k(thread ScoreTile& scores, thread const QueryTile& q,
                             const threadgroup Pair* k_lane) {
  UNROLL
  for (short d = FIRST; d < LAST; d++) {
    Pair q_fragment[ROW_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      q_fragment[i] = q.fragment(i, d);
    }
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const Pair k_fragment = k_lane[j * FRAGMENT / 2 * padded(HEAD_DIM_QK) + d * FRAGMENT];
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
          v_lane[(j * FRAGMENT * padded(HEAD_DIM_V) + d * FRAGMENT) / LANE_COLUMNS];
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

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd(
    const device ELEMENT* q [[buffer(FLASH_FWD_Q)]],
    const device ELEMENT* k [[buffer(FLASH_FWD_K)]],
    const device ELEMENT* v [[buffer(FLASH_FWD_V)]], device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]],
    constant FlashFwdParams& params [[buffer(FLASH_FWD_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 k_tile[K_TILE_BYTES / sizeof(uint4)];  // [BLOCK_K / 2, D] pairs of keys
  threadgroup uint4 v_tile[V_TILE_BYTES / sizeof(uint4)];  // [BLOCK_K, Dv]

  const int batch = threadgroup_position.z;
  const int head = threadgroup_position.y;
  const int kv_head = head / params.queries_per_kv;
#if CAUSAL
  // Later queries see more keys: start the longest rows first.
  const int q_block = threadgroups.x - 1 - threadgroup_position.x;
#else
  const int q_block = threadgroup_position.x;
#endif

  CausalMask mask;
  mask.kv_length = params.kv_length;
  mask.offset = params.causal_offset;
  mask.causal = CAUSAL;

  DenseKV<ELEMENT> kv;
  kv.k = k + batch * params.k_strides.batch + kv_head * params.k_strides.head;
  kv.v = v + batch * params.v_strides.batch + kv_head * params.v_strides.head;
  kv.k_row_stride = params.k_strides.row;
  kv.v_row_stride = params.v_strides.row;
  kv.length = params.kv_length;

  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const int last_query = params.q_length - 1;
  const int simdgroup_query = q_block * BLOCK_Q + simdgroup * SIMDGROUP_ROWS;
  const int simdgroup_kv_end =
      simdgroup_query > last_query
          ? 0
          : mask.kv_end(min(simdgroup_query + SIMDGROUP_ROWS - 1, last_query));

  QueryTile q_tile;
  q_tile.load(q + batch * params.q_strides.batch + head * params.q_strides.head + column,
              params.q_strides.row, simdgroup_query + row, last_query);
  const threadgroup Pair* k_lane =
      reinterpret_cast<const threadgroup Pair*>(k_tile) + column / 2 * padded(HEAD_DIM_QK) + row;
  const threadgroup Pair* v_lane = reinterpret_cast<const threadgroup Pair*>(v_tile) +
                                   (row * padded(HEAD_DIM_V) + column) / LANE_COLUMNS;

  OutTile o;  // [ROW_FRAGMENTS * 8, Dv]
  o.fill(0.0f);
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    softmax[i].reset();
  }

  const int kv_end = mask.kv_end(min(q_block * BLOCK_Q + BLOCK_Q - 1, last_query));
  for (int kv_block = 0; kv_block < kv_end; kv_block += BLOCK_K) {
    // Every SIMD group has read the tiles of the block before.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_k<ELEMENT, BLOCK_K, HEAD_DIM_QK, THREADS>(k_tile, kv, kv_block, thread_index);
    stage_v<ELEMENT, BLOCK_K, HEAD_DIM_V, THREADS>(v_tile, kv, kv_block, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kv_block >= simdgroup_kv_end) {
      continue;
    }

    ScoreTile scores;  // [ROW_FRAGMENTS * 8, BLOCK_K]
    scores.fill(0.0f);
    multiply_q_k<0, CHAIN_FRAGMENTS>(scores, q_tile, k_lane);
#if HEAD_DIM_QK > CHAIN_COLUMNS
    ScoreTile second_chain;
    second_chain.fill(0.0f);
    multiply_q_k<CHAIN_FRAGMENTS, QK_FRAGMENTS>(second_chain, q_tile, k_lane);
    scores.add(second_chain);
#endif
    scores.scale(params.scale_log2);
    if (!mask.block_visible(simdgroup_query, kv_block + BLOCK_K)) {
      mask.apply(scores, simdgroup_query + row, kv_block + column);
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
    const float row_sum = softmax[i].row_sum();
    const int query = simdgroup_query + i * FRAGMENT + row;
    if (query > last_query) {
      continue;
    }
    // A row that sees no key is 0, whatever hidden values its weights of 0 have met.
    const float normaliser = 1.0f / row_sum;
    device ELEMENT* out_lane = out + batch * params.out_strides.batch +
                               head * params.out_strides.head + query * params.out_strides.row +
                               column;
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      const Fragment<float> values =
          row_sum == 0.0f ? Fragment<float>(0.0f, 0.0f) : o.fragments[i][d] * normaliser;
      *reinterpret_cast<device Pair*>(out_lane + d * FRAGMENT) =
          Pair(ELEMENT(values.x), ELEMENT(values.y));
    }
    if (column == 0) {
      const int64_t lse_row = (int64_t(batch) * params.heads + head) * params.q_length + query;
      softmax_lse[lse_row] = softmax[i].logsumexp(row_sum);
    }
  }
}
