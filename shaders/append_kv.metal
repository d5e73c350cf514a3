// Writes new keys and values into a cache and rotates q in place, in one dispatch.
//
// The first threadgroups of a sequence write one KV head each. The others rotate HEADS heads of q.
#define LONG_OFFSETS 1
#define TABLE_ELEMENT ROTARY_ELEMENT
#define INTERLEAVED ROTARY_INTERLEAVED

#include "cache_write.h"
#include "rotate_rows.h"

// The host defines ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, VECTOR, HEADS and the features that are on,
// with PAGE_SIZE, KV_ELEMENT, KV_FORMAT, V_FORMAT, HADAMARD, ROTARY_ELEMENT, ROTARY_DIM and
// ROTARY_FIRST. VECTOR and HEADS are 1 without Q_ROTARY.
FEATURE(CACHE_SEQLENS)

// Rotates a block of tokens of q in HEADS heads.
METAL_FUNC void rotate_queries(device ELEMENT* q, thread const AppendBuffers& buffers,
                               int64_t first_row, int64_t batch, int first_head, int first_token,
                               int thread_index, int threads, constant AppendKvParams& params) {
  constant RopeParams& rope = params.q;
  const int tokens = min(params.block_tokens, rope.length - first_token);
  for (int i = thread_index; i < tokens * rope.pair_units; i += threads) {
    const int token = first_token + i / rope.pair_units;
    const int pair = i % rope.pair_units * VECTOR;
    const PairColumns columns = pair_columns(pair, rope.pairs);
    device ELEMENT* q_token = q + batch * rope.q_strides.batch + token * rope.q_strides.row;
    PairAngles angles;
    angles.load(buffers.cos_table, buffers.sin_table, 0,
                first_row + (params.rotate_q_by_token != 0 ? token : 0), pair, rope);
    UNROLL
    for (short h = 0; h < HEADS; h++) {
      const int head = first_head + h;
      if (head < rope.q_heads) {
        device ELEMENT* row = q_token + head * rope.q_strides.head + ROTARY_FIRST;
        rotate_pairs(row, 1, row, 1, columns, angles, rope);
      }
    }
  }
}

[[kernel, max_total_threads_per_threadgroup(APPEND_THREADS)]] void append_kv(
    const device ELEMENT* k [[buffer(APPEND_K)]], const device ELEMENT* v [[buffer(APPEND_V)]],
    device KeyElement* k_cache [[buffer(APPEND_K_CACHE)]],
    device ValueElement* v_cache [[buffer(APPEND_V_CACHE)]],
    constant AppendKvParams& params [[buffer(APPEND_PARAMS)]],
    // clang-format off
    WHEN(K_SCALE, device ScaleElement<KV_FORMAT>* k_scale [[buffer(APPEND_K_SCALE)]],)
    WHEN(V_SCALE, device ScaleElement<V_FORMAT>* v_scale [[buffer(APPEND_V_SCALE)]],)
    WHEN(CACHE_SEQLENS, const device int* cache_seqlens [[buffer(APPEND_SEQLENS)]],)
    WHEN(PAGED, const device int* block_table [[buffer(APPEND_BLOCK_TABLE)]],)
    WHEN(CACHE_BATCH_IDX, const device int* cache_batch_idx [[buffer(APPEND_CACHE_BATCH_IDX)]],)
    WHEN(LEFTPAD_K, const device int* leftpad_k [[buffer(APPEND_LEFTPAD_K)]],)
    WHEN(Q_ROTARY, device ELEMENT* q [[buffer(APPEND_Q)]],)
    WHEN(NEW_K_ROTARY, const device ROTARY_ELEMENT* cos_table [[buffer(APPEND_COS)]],
                       const device ROTARY_ELEMENT* sin_table [[buffer(APPEND_SIN)]],)
    // clang-format on
    uint3 position [[threadgroup_position_in_grid]],
    uint3 group [[threads_per_threadgroup]], uint thread_index [[thread_index_in_threadgroup]]) {
  AppendBuffers buffers;
  buffers.k = k;
  buffers.v = v;
  buffers.k_cache = k_cache;
  buffers.v_cache = v_cache;
  WHEN(K_SCALE, buffers.k_scale = k_scale;)
  WHEN(V_SCALE, buffers.v_scale = v_scale;)
  WHEN(NEW_K_ROTARY, buffers.cos_table = cos_table; buffers.sin_table = sin_table;)

  const int block = position.x;
  const int head = position.y;
  const int batch = position.z;
  AppendPlace place;
  place.first = 0;
  WHEN(CACHE_SEQLENS, place.first = cache_seqlens[batch];)
  place.first_rotary = place.first;
  WHEN(LEFTPAD_K, place.first_rotary -= leftpad_k[batch];)
  place.cache_batch = batch;
  WHEN(CACHE_BATCH_IDX, place.cache_batch = cache_batch_idx[batch];)
  WHEN(PAGED, place.block_table = block_table + batch * params.append.block_table_stride;)

  if (head < params.kv_heads) {
    const int first_row = block * params.block_rows;
    const int end_row = first_row + min(params.block_rows, params.append.length - first_row);
    append_rows(buffers, place, batch, head, first_row, end_row, thread_index, group.x,
                params.append);
    return;
  }
  WHEN(Q_ROTARY,
       rotate_queries(q, buffers, place.first_rotary, batch, (head - params.kv_heads) * HEADS,
                      block * params.block_tokens, thread_index, group.x, params);)
}
