// The input buffers of the attention kernels, and the rows of a (sequence, head) in them.
#pragma once

#include "cache.h"
#include "dropout.h"
#include "piece.h"
#include "scores.h"

// A kernel that appends writes to the cache; others only read it.
#define CACHE_ACCESS UNLESS(APPEND, const) device

UNLESS(SINK, using SINK_ELEMENT = float;)

// All buffers, as X(feature, type, name, slot). A buffer is bound if its feature is on.
#define FLASH_INPUTS(X)                                                               \
  X(1, const device ELEMENT*, q, FLASH_Q)                                             \
  X(1, CACHE_ACCESS KeyElement*, k, FLASH_K)                                          \
  X(1, CACHE_ACCESS ValueElement*, v, FLASH_V)                                        \
  X(PACKED_Q, const device int*, cu_seqlens_q, FLASH_CU_SEQLENS_Q)                    \
  X(VARLEN, const device int*, cu_seqlens_k, FLASH_CU_SEQLENS_K)                      \
  X(SEQUSED_K, const device int*, seqused_k, FLASH_SEQUSED_K)                         \
  X(LEFTPAD_K, const device int*, leftpad_k, FLASH_LEFTPAD_K)                         \
  X(MASK, const device uchar*, attn_mask, FLASH_MASK)                                 \
  X(BIAS, const device BIAS_ELEMENT*, attn_bias, FLASH_BIAS)                          \
  X(ALIBI, const device float*, alibi_slopes, FLASH_ALIBI_SLOPES)                     \
  X(SINK, const device SINK_ELEMENT*, learnable_sink, FLASH_SINK)                     \
  X(Q_ROTARY, const device ROTARY_ELEMENT*, q_cos, FLASH_Q_COS)                       \
  X(Q_ROTARY, const device ROTARY_ELEMENT*, q_sin, FLASH_Q_SIN)                       \
  X(K_ROTARY, const device ROTARY_ELEMENT*, k_cos, FLASH_K_COS)                       \
  X(K_ROTARY, const device ROTARY_ELEMENT*, k_sin, FLASH_K_SIN)                       \
  X(DROPOUT, const device int64_t*, rng_state, FLASH_RNG_STATE)                       \
  X(PAGED, const device int*, block_table, FLASH_BLOCK_TABLE)                         \
  X(CACHE_BATCH_IDX, const device int*, cache_batch_idx, FLASH_CACHE_BATCH_IDX)       \
  X(K_SCALE, CACHE_ACCESS ScaleElement<KV_FORMAT>*, k_scale, FLASH_K_SCALE)           \
  X(V_SCALE, CACHE_ACCESS ScaleElement<V_FORMAT>*, v_scale, FLASH_V_SCALE)            \
  X(BLOCK_LISTS, const device int*, block_counts, FLEX_BLOCK_COUNTS)                  \
  X(BLOCK_LISTS, const device int*, block_indices, FLEX_BLOCK_INDICES)                \
  X(FLEX_FULL_BLOCKS, const device int*, full_block_counts, FLEX_FULL_BLOCK_COUNTS)   \
  X(FLEX_FULL_BLOCKS, const device int*, full_block_indices, FLEX_FULL_BLOCK_INDICES) \
  X(FLEX_ORDER, const device int*, block_order, FLEX_BLOCK_ORDER)                     \
  X(INDICES, const device int*, indices, FLASH_INDICES)                               \
  X(APPEND, const device ELEMENT*, new_k, FLASH_DECODE_NEW_K)                         \
  X(APPEND, const device ELEMENT*, new_v, FLASH_DECODE_NEW_V)                         \
  X(PACKED_NEW_K, const device int*, cu_seqlens_k_new, FLASH_DECODE_CU_SEQLENS_K_NEW) \
  X(TREE_PARENTS, const device int*, parents, FLASH_DECODE_PARENTS)                   \
  X(TREE_MASK, const device uchar*, tree_mask, FLASH_DECODE_TREE_MASK)

// Macros that declare the kernel parameters, declare the fields of FlashInputs, and assign to them.
// A field without a buffer is null. FLEX_CAPTURES, the captured tensors, are always bound.
#define FLASH_KERNEL_PARAMETER(type, name, slot) type name [[buffer(slot)]],
#define FLASH_FIELD(type, name, slot) type name;
#define FLASH_SET_FIELD(type, name, slot) inputs.name = name;
#define FLASH_PARAMETER_WHEN(feature, type, name, slot) \
  WHEN(feature, FLASH_KERNEL_PARAMETER(type, name, slot))
#define FLASH_FIELD_ALWAYS(feature, type, name, slot) FLASH_FIELD(type, name, slot)
#define FLASH_SET_OR_NULL(feature, type, name, slot) \
  inputs.name = WHEN(feature, name) UNLESS(feature, nullptr);
#define FLASH_PARAMETERS             \
  FLASH_INPUTS(FLASH_PARAMETER_WHEN) \
  WHEN(FLEX, FLEX_CAPTURES(FLASH_KERNEL_PARAMETER))
#define FLASH_SET_INPUTS          \
  FLASH_INPUTS(FLASH_SET_OR_NULL) \
  WHEN(FLEX, FLEX_CAPTURES(FLASH_SET_FIELD))

using Queries = Operand<ELEMENT, HEAD_DIM_QK, Q_ROTARY>;
using Keys =
    conditional_t<PAGED || QUANTISED, CacheOperand<KV_FORMAT, HEAD_DIM_QK, K_ROTARY, 0xffffffff>,
                  Operand<KV_ELEMENT, HEAD_DIM_QK, K_ROTARY>>;
using Values = conditional_t<PAGED || QUANTISED, CacheOperand<V_FORMAT, HEAD_DIM_V, false, 0>,
                             Operand<KV_ELEMENT, HEAD_DIM_V>>;

// Call it before `find` of rows [first, first + rows), in uniform control flow of the SIMD group.
METAL_FUNC void move_to(thread Keys& keys, thread Values& values, int first, int rows,
                        ushort lane) {
  keys.move_to(first, rows, lane);
  values.use_pages_of(keys);
}

struct FlashInputs {
  FLASH_INPUTS(FLASH_FIELD_ALWAYS)
  WHEN(FLEX, FLEX_CAPTURES(FLASH_FIELD))

  // The sequence of a batch index. The index after the last has the queries of no sequence.
  METAL_FUNC Sequence sequence(int batch, constant FlashParams& params) const thread {
    Sequence result;
    result.reset(params);
    if (PACKED_Q) {
      result.unpack_queries(cu_seqlens_q, batch, params);
      if (VARLEN) { result.unpack_keys(cu_seqlens_k, batch, params); }
      if (batch == params.batch) { return result; }
    }
    if (CACHE_BATCH_IDX) {
      const int index = cache_batch_idx[batch];
      result.impossible = result.impossible || index < 0 || index >= params.cache_size;
    }
    const int keys = result.kv_length;
    if (APPEND) {
      const int used = seqused_k[batch];
      const Range added = new_rows(batch, params);
      result.impossible = result.impossible || (PACKED_NEW_K && added.end < 0);
      result.end_keys(used < 0 ? used : used + max(added.end - added.begin, 0));
    } else if (SEQUSED_K) {
      result.end_keys(seqused_k[batch]);
    }
    if (LEFTPAD_K) { result.begin_keys(leftpad_k[batch], keys); }
    return result;
  }

  // The sequence's rows of new_k and new_v (APPEND); [0, -1) if the lengths are invalid.
  METAL_FUNC Range new_rows(int batch, constant FlashParams& params) const thread {
    if (!PACKED_NEW_K) { return {0, params.new_keys}; }
    const int begin = cu_seqlens_k_new[batch];
    const int end = cu_seqlens_k_new[batch + 1];
    const bool valid = begin >= 0 && begin <= end && end <= params.new_keys;
    return {valid ? begin : 0, valid ? end : -1};
  }

  METAL_FUNC Queries queries(int batch, int head, thread const Sequence& sequence,
                             constant FlashParams& params) const thread {
    Queries operand;
    operand.reset(q, params.q_strides, batch, head, sequence.q_start);
    if (Q_ROTARY) {
      operand.rotary.reset(q_cos, params.q_cos_strides, q_sin, params.q_sin_strides, batch);
    }
    return operand;
  }

  METAL_FUNC Keys keys(int batch, int kv_head, thread const Sequence& sequence,
                       constant FlashParams& params) const thread {
    Keys operand;
    place(operand, k, params.k_strides, batch, kv_head, sequence, params);
    if (K_SCALE) {
      operand.reset_scale(k_scale, params.k_scale_strides, batch, kv_head, kv_batch(batch),
                          sequence.kv_start);
    }
    if (K_ROTARY) {
      operand.rotary.reset(k_cos, params.k_cos_strides, k_sin, params.k_sin_strides, batch);
    }
    return operand;
  }

  METAL_FUNC Values values(int batch, int kv_head, thread const Sequence& sequence,
                           constant FlashParams& params) const thread {
    Values operand;
    place(operand, v, params.v_strides, batch, kv_head, sequence, params);
    if (V_SCALE) {
      operand.reset_scale(v_scale, params.v_scale_strides, batch, kv_head, kv_batch(batch),
                          sequence.kv_start);
    }
    return operand;
  }

  // The index of a sequence's rows in the batch dimension of K and V; 0 with pages.
  METAL_FUNC int kv_batch(int batch) const thread {
    return PAGED ? 0 : CACHE_BATCH_IDX ? cache_batch_idx[batch] : batch;
  }

  template <typename Source, typename Element>
  METAL_FUNC void place(thread Source& operand, const device Element* tensor,
                        constant RowStrides& strides, int batch, int kv_head,
                        thread const Sequence& sequence,
                        constant FlashParams& params) const thread {
    operand.reset(tensor, strides, kv_batch(batch), kv_head, sequence.kv_start);
    if (PAGED) {
      operand.reset_pages(block_table + batch * params.block_table_stride, sequence.kv_length,
                          params.cache_size);
    }
  }

  METAL_FUNC float sink_log2(int head) const thread { return base_2(learnable_sink[head]); }

  // The sink's weight relative to row_max, a maximum in base 2.
  METAL_FUNC float sink_weight(int head, float row_max) const thread {
    return fast::exp2(base_2_less(learnable_sink[head], row_max));
  }
};
