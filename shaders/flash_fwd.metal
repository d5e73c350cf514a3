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
constant constexpr int SIMDGROUP_ROWS = ROW_FRAGMENTS * FRAGMENT;
constant constexpr int BLOCK_Q = SIMDGROUPS * SIMDGROUP_ROWS;
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;
constant constexpr int K_TILE_BYTES = BLOCK_K * padded(HEAD_DIM_QK) * sizeof(ELEMENT);
constant constexpr int V_TILE_BYTES = BLOCK_K * padded(HEAD_DIM_V) * sizeof(ELEMENT);

static_assert(HEAD_DIM_QK % FRAGMENT == 0 && HEAD_DIM_V % FRAGMENT == 0,
              "head dims are multiples of 8");
static_assert(BLOCK_K % FRAGMENT == 0, "BLOCK_K is a multiple of 8");
static_assert(K_TILE_BYTES + V_TILE_BYTES <= 32768,
              "the K and V tiles fit in 32 KiB of threadgroup memory");

using Pair = Fragment<ELEMENT>;

// One row's fragment of Q: a lane's two columns.
METAL_FUNC Pair load_q(const device ELEMENT* q_lane, int fragment) {
  return Pair(q_lane[fragment * FRAGMENT], q_lane[fragment * FRAGMENT + 1]);
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

  // q: [ROW_FRAGMENTS * 8, D]. Queries past the end repeat the last one and are not stored.
  const device ELEMENT* q_lane[ROW_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int query = min(simdgroup_query + i * FRAGMENT + row, last_query);
    q_lane[i] = q + batch * params.q_strides.batch + head * params.q_strides.head +
                query * params.q_strides.row + column;
  }
#if Q_IN_REGISTERS
  Pair q_fragments[ROW_FRAGMENTS][QK_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    UNROLL
    for (short d = 0; d < QK_FRAGMENTS; d++) {
      q_fragments[i][d] = load_q(q_lane[i], d);
    }
  }
#endif

  // o: [ROW_FRAGMENTS * 8, Dv]
  Fragment<float> o[ROW_FRAGMENTS][V_FRAGMENTS];
  OnlineSoftmax softmax[ROW_FRAGMENTS];
  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    softmax[i].reset();
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      o[i][d] = Fragment<float>(0.0f);
    }
  }

  const threadgroup Pair* k_lane =
      reinterpret_cast<const threadgroup Pair*>(k_tile) + column / 2 * padded(HEAD_DIM_QK) + row;
  const threadgroup Pair* v_lane = reinterpret_cast<const threadgroup Pair*>(v_tile) +
                                   (row * padded(HEAD_DIM_V) + column) / LANE_COLUMNS;

  const int kv_end = mask.kv_end(min(q_block * BLOCK_Q + BLOCK_Q - 1, last_query));
  for (int kv_block = 0; kv_block < kv_end; kv_block += BLOCK_K) {
    // The tiles of the block before have been read by every SIMD group.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_k<ELEMENT, BLOCK_K, HEAD_DIM_QK, THREADS>(k_tile, kv, kv_block, thread_index);
    stage_v<ELEMENT, BLOCK_K, HEAD_DIM_V, THREADS>(v_tile, kv, kv_block, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (kv_block >= simdgroup_kv_end) {
      continue;
    }

    // scores = q k^T: [ROW_FRAGMENTS * 8, BLOCK_K]
    Fragment<float> scores[ROW_FRAGMENTS][KEY_FRAGMENTS];
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        scores[i][j] = Fragment<float>(0.0f);
      }
    }
    UNROLL
    for (short d = 0; d < QK_FRAGMENTS; d++) {
      Pair q_fragment[ROW_FRAGMENTS];
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
#if Q_IN_REGISTERS
        q_fragment[i] = q_fragments[i][d];
#else
        q_fragment[i] = load_q(q_lane[i], d);
#endif
      }
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        const Pair k_fragment = k_lane[j * FRAGMENT / 2 * padded(HEAD_DIM_QK) + d * FRAGMENT];
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          mma<ELEMENT, ELEMENT>(scores[i][j], q_fragment[i], k_fragment);
        }
      }
    }

    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        scores[i][j] *= params.scale_log2;
      }
    }
    if (!mask.block_visible(simdgroup_query, kv_block + BLOCK_K)) {
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        UNROLL
        for (short j = 0; j < KEY_FRAGMENTS; j++) {
          mask.apply(scores[i][j], simdgroup_query + i * FRAGMENT + row,
                     kv_block + j * FRAGMENT + column);
        }
      }
    }

    // weights = exp(scores - row_max), in place; o shrinks to the new maximum.
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      const float correction = softmax[i].update<KEY_FRAGMENTS>(scores[i]);
      UNROLL
      for (short d = 0; d < V_FRAGMENTS; d++) {
        o[i][d] *= correction;
      }
    }

    // o += weights v
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short d = 0; d < V_FRAGMENTS; d++) {
        const Pair v_fragment =
            v_lane[(j * FRAGMENT * padded(HEAD_DIM_V) + d * FRAGMENT) / LANE_COLUMNS];
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          mma<float, ELEMENT>(o[i][d], scores[i][j], v_fragment);
        }
      }
    }
  }

  UNROLL
  for (short i = 0; i < ROW_FRAGMENTS; i++) {
    const int query = simdgroup_query + i * FRAGMENT + row;
    const float row_sum = softmax[i].row_sum();
    const float inverse = 1.0f / row_sum;
    if (query >= params.q_length) {
      continue;
    }
    device ELEMENT* out_lane = out + batch * params.out_strides.batch +
                               head * params.out_strides.head + query * params.out_strides.row +
                               column;
    UNROLL
    for (short d = 0; d < V_FRAGMENTS; d++) {
      const Fragment<float> values = row_sum == 0.0f ? Fragment<float>(0.0f) : o[i][d] * inverse;
      *reinterpret_cast<device Pair*>(out_lane + d * FRAGMENT) =
          Pair(ELEMENT(values.x), ELEMENT(values.y));
    }
    if (column == 0) {
      const int64_t lse_row = (int64_t(batch) * params.heads + head) * params.q_length + query;
      softmax_lse[lse_row] = softmax[i].logsumexp(row_sum);
    }
  }
}
