// What the kernels of attention read, and where a (sequence, head) lies in it.
#pragma once

#include "cache.h"
#include "dropout.h"
#include "features.h"
#include "mask.h"
#include "operand.h"
#include "params.h"
#include "scores.h"
#include "sequence.h"

// Every buffer once, as X(type, name, slot): those of a feature are bound if it is on.
#if VARLEN
#define VARLEN_INPUTS(X)                                 \
  X(const device int*, cu_seqlens_q, FLASH_CU_SEQLENS_Q) \
  X(const device int*, cu_seqlens_k, FLASH_CU_SEQLENS_K)
#else
#define VARLEN_INPUTS(X)
#endif
#if SEQUSED_K
#define SEQUSED_INPUTS(X) X(const device int*, seqused_k, FLASH_SEQUSED_K)
#else
#define SEQUSED_INPUTS(X)
#endif
#if LEFTPAD_K
#define LEFTPAD_INPUTS(X) X(const device int*, leftpad_k, FLASH_LEFTPAD_K)
#else
#define LEFTPAD_INPUTS(X)
#endif
#if MASK
#define MASK_INPUTS(X) X(const device uchar*, attn_mask, FLASH_MASK)
#else
#define MASK_INPUTS(X)
#endif
#if BIAS
#define BIAS_INPUTS(X) X(const device BIAS_ELEMENT*, attn_bias, FLASH_BIAS)
#else
#define BIAS_INPUTS(X)
#endif
#if ALIBI
#define ALIBI_INPUTS(X) X(const device float*, alibi_slopes, FLASH_ALIBI_SLOPES)
#else
#define ALIBI_INPUTS(X)
#endif
#if SINK
#define SINK_INPUTS(X) X(const device SINK_ELEMENT*, learnable_sink, FLASH_SINK)
#else
#define SINK_INPUTS(X)
#endif
#if Q_ROTARY
#define Q_ROTARY_INPUTS(X)                            \
  X(const device ROTARY_ELEMENT*, q_cos, FLASH_Q_COS) \
  X(const device ROTARY_ELEMENT*, q_sin, FLASH_Q_SIN)
#else
#define Q_ROTARY_INPUTS(X)
#endif
#if K_ROTARY
#define K_ROTARY_INPUTS(X)                            \
  X(const device ROTARY_ELEMENT*, k_cos, FLASH_K_COS) \
  X(const device ROTARY_ELEMENT*, k_sin, FLASH_K_SIN)
#else
#define K_ROTARY_INPUTS(X)
#endif
#if DROPOUT
#define DROPOUT_INPUTS(X) X(const device int64_t*, rng_state, FLASH_RNG_STATE)
#else
#define DROPOUT_INPUTS(X)
#endif
#if PAGE_SIZE
#define BLOCK_TABLE_INPUTS(X) X(const device int*, block_table, FLASH_BLOCK_TABLE)
#else
#define BLOCK_TABLE_INPUTS(X)
#endif
#if CACHE_BATCH_IDX
#define CACHE_BATCH_IDX_INPUTS(X) X(const device int*, cache_batch_idx, FLASH_CACHE_BATCH_IDX)
#else
#define CACHE_BATCH_IDX_INPUTS(X)
#endif
#if FLEX
#define FLEX_INPUTS(X) FLEX_CAPTURES(X)
#else
#define FLEX_INPUTS(X)
#endif
#if BLOCK_LISTS
#define BLOCK_LIST_INPUTS(X)                            \
  X(const device int*, block_counts, FLEX_BLOCK_COUNTS) \
  X(const device int*, block_indices, FLEX_BLOCK_INDICES)
#else
#define BLOCK_LIST_INPUTS(X)
#endif
#if FLEX_FULL_BLOCKS
#define FULL_BLOCK_LIST_INPUTS(X)                                 \
  X(const device int*, full_block_counts, FLEX_FULL_BLOCK_COUNTS) \
  X(const device int*, full_block_indices, FLEX_FULL_BLOCK_INDICES)
#else
#define FULL_BLOCK_LIST_INPUTS(X)
#endif
#if FLEX_ORDER
#define BLOCK_ORDER_INPUTS(X) X(const device int*, block_order, FLEX_BLOCK_ORDER)
#else
#define BLOCK_ORDER_INPUTS(X)
#endif
// A kernel that appends to the cache writes what others only read.
#if APPEND
#define CACHE_ACCESS device
#else
#define CACHE_ACCESS const device
#endif
#if K_SCALE
#define K_SCALE_INPUTS(X) X(CACHE_ACCESS KV_SCALE_ELEMENT*, k_scale, FLASH_K_SCALE)
#else
#define K_SCALE_INPUTS(X)
#endif
#if V_SCALE
#define V_SCALE_INPUTS(X) X(CACHE_ACCESS KV_SCALE_ELEMENT*, v_scale, FLASH_V_SCALE)
#else
#define V_SCALE_INPUTS(X)
#endif
#define FLASH_INPUTS(X)                   \
  X(const device ELEMENT*, q, FLASH_Q)    \
  X(CACHE_ACCESS KV_ELEMENT*, k, FLASH_K) \
  X(CACHE_ACCESS KV_ELEMENT*, v, FLASH_V) \
  VARLEN_INPUTS(X)                        \
  SEQUSED_INPUTS(X)                       \
  LEFTPAD_INPUTS(X)                       \
  MASK_INPUTS(X)                          \
  BIAS_INPUTS(X)                          \
  ALIBI_INPUTS(X)                         \
  SINK_INPUTS(X)                          \
  Q_ROTARY_INPUTS(X)                      \
  K_ROTARY_INPUTS(X)                      \
  DROPOUT_INPUTS(X)                       \
  BLOCK_TABLE_INPUTS(X)                   \
  CACHE_BATCH_IDX_INPUTS(X)               \
  K_SCALE_INPUTS(X)                       \
  V_SCALE_INPUTS(X)                       \
  FLEX_INPUTS(X)                          \
  BLOCK_LIST_INPUTS(X)                    \
  FULL_BLOCK_LIST_INPUTS(X)               \
  BLOCK_ORDER_INPUTS(X)

// A kernel's parameters, the fields that hold them, and how they get there.
#define FLASH_KERNEL_PARAMETER(type, name, slot) type name [[buffer(slot)]],
#define FLASH_FIELD(type, name, slot) type name;
#define FLASH_SET_FIELD(type, name, slot) inputs.name = name;
#define FLASH_PARAMETERS FLASH_INPUTS(FLASH_KERNEL_PARAMETER)
#define FLASH_SET_INPUTS FLASH_INPUTS(FLASH_SET_FIELD)

template <typename T>
METAL_FUNC const device T* first_row(const device T* tensor, constant RowStrides& strides,
                                     int batch, int head, int row) {
  return tensor + batch * strides.batch + head * strides.head + row * strides.row;
}

template <bool TRANSPOSED, typename T, int ROWS, bool PAIRS>
METAL_FUNC void reset_mask(thread MaskRows<T, ROWS, PAIRS>& rows, const device T* mask,
                           constant MaskStrides& strides, int batch, int head, int row,
                           int last_query, int last_key) {
  const device T* first = mask + batch * strides.batch + head * strides.head;
  if (TRANSPOSED) {
    rows.reset(first, strides.key, strides.query, row, last_key, last_query);
  } else {
    rows.reset(first, strides.query, strides.key, row, last_query, last_key);
  }
}

using Queries = Operand<ELEMENT, HEAD_DIM_QK, Q_ROTARY>;
#if PAGE_SIZE || KV_FORMAT
using Keys = CacheOperand<HEAD_DIM_QK, K_ROTARY, 0xffffffff>;
using Values = CacheOperand<HEAD_DIM_V, false, 0>;
#else
using Keys = Operand<KV_ELEMENT, HEAD_DIM_QK, K_ROTARY>;
using Values = Operand<KV_ELEMENT, HEAD_DIM_V>;
#endif

// Call it before looking up rows [first, first + rows) of either. Uniform in the SIMD group.
METAL_FUNC void move_to(thread Keys& keys, thread Values& values, int first, int rows,
                        ushort lane) {
#if PAGE_SIZE
  keys.pages.move_to(first, rows, lane);
  values.pages = keys.pages;
#endif
}

struct FlashInputs {
  FLASH_INPUTS(FLASH_FIELD)

  // The batch's sequence. The one after the last has the queries that belong to no sequence.
  METAL_FUNC Sequence sequence(int batch, constant FlashParams& params) const thread {
    Sequence result;
    result.reset(params);
#if VARLEN
    result.unpack(cu_seqlens_q, cu_seqlens_k, batch, params);
    if (batch == params.batch) {
      return result;
    }
#endif
#if CACHE_BATCH_IDX
    const int index = cache_batch_idx[batch];
    result.impossible = result.impossible || index < 0 || index >= params.cache_size;
#endif
#if LEFTPAD_K
    const int keys = result.kv_length;
#endif
#if APPEND
    const int used = seqused_k[batch];
    result.end_keys(used < 0 ? used : used + params.new_keys);
#elif SEQUSED_K
    result.end_keys(seqused_k[batch]);
#endif
#if LEFTPAD_K
    result.begin_keys(leftpad_k[batch], keys);
#endif
    return result;
  }

  METAL_FUNC Queries queries(int batch, int head, thread const Sequence& sequence,
                             constant FlashParams& params) const thread {
    Queries operand;
    operand.rows = first_row(q, params.q_strides, batch, head, sequence.q_start);
    operand.row_stride = params.q_strides.row;
#if Q_ROTARY
    operand.rotary.reset(q_cos, params.q_cos_strides, q_sin, params.q_sin_strides, batch);
#endif
    return operand;
  }

  METAL_FUNC Keys keys(int batch, int kv_head, thread const Sequence& sequence,
                       constant FlashParams& params) const thread {
    Keys operand;
    place(operand, k, params.k_strides, batch, kv_head, sequence, params);
#if K_SCALE
    scale(operand, k_scale, params.k_scale_strides, batch, kv_head, sequence);
#endif
#if K_ROTARY
    operand.rotary.reset(k_cos, params.k_cos_strides, k_sin, params.k_sin_strides, batch);
#endif
    return operand;
  }

  METAL_FUNC Values values(int batch, int kv_head, thread const Sequence& sequence,
                           constant FlashParams& params) const thread {
    Values operand;
    place(operand, v, params.v_strides, batch, kv_head, sequence, params);
#if V_SCALE
    scale(operand, v_scale, params.v_scale_strides, batch, kv_head, sequence);
#endif
    return operand;
  }

  // The batch of K and V that has a sequence's rows; 0 with pages, which the table finds.
  METAL_FUNC int kv_batch(int batch) const thread {
#if PAGE_SIZE
    return 0;
#elif CACHE_BATCH_IDX
    return cache_batch_idx[batch];
#else
    return batch;
#endif
  }

  // Where the rows of K or V lie.
  template <typename Source>
  METAL_FUNC void place(thread Source& operand, const device KV_ELEMENT* tensor,
                        constant RowStrides& strides, int batch, int kv_head,
                        thread const Sequence& sequence,
                        constant FlashParams& params) const thread {
#if PAGE_SIZE || KV_FORMAT
    operand.data = rows_of(tensor, strides, batch, kv_head, sequence);
#else
    operand.rows = first_row(tensor, strides, kv_batch(batch), kv_head, sequence.kv_start);
    operand.row_stride = strides.row;
#endif
#if PAGE_SIZE
    operand.pages.reset(block_table + batch * params.block_table_stride, sequence.kv_length,
                        params.cache_size);
#endif
#if KV_FORMAT && !KV_BLOCK_SCALES
    operand.scale = 1.0f;
#endif
  }

#if PAGE_SIZE || KV_FORMAT
  template <typename T>
  METAL_FUNC PagedRows<T> rows_of(const device T* tensor, constant RowStrides& strides, int batch,
                                  int kv_head, thread const Sequence& sequence) const thread {
    PagedRows<T> rows;
    rows.first = first_row(tensor, strides, kv_batch(batch), kv_head, sequence.kv_start);
    rows.page_stride = strides.batch;
    rows.row_stride = strides.row;
    return rows;
  }
#endif

#if K_SCALE || V_SCALE
  template <typename Source>
  METAL_FUNC void scale(thread Source& operand, const device KV_SCALE_ELEMENT* scales,
                        constant RowStrides& strides, int batch, int kv_head,
                        thread const Sequence& sequence) const thread {
#if KV_BLOCK_SCALES
    operand.scales = rows_of(scales, strides, batch, kv_head, sequence);
#else
    operand.scale = scales[batch * strides.batch + kv_head * strides.head];
#endif
  }
#endif

  // The rules for scores whose lane's first element has this row and, in the block at 0, column.
  template <int ROWS, bool TRANSPOSED>
  METAL_FUNC ScoreRules<ROWS, TRANSPOSED> score_rules(int batch, int head, int row, int column,
                                                      thread const Visibility& visible,
                                                      constant FlashParams& params) const thread {
    ScoreRules<ROWS, TRANSPOSED> rules;
    rules.lane_column = column;
#if ALIBI
    rules.slope_log2 = alibi_slopes[batch * params.alibi_batch_stride + head] * M_LOG2E_F;
    rules.distance = row - column + (TRANSPOSED ? -visible.q_offset : visible.q_offset);
#endif
#if MASK
    reset_mask<TRANSPOSED>(rules.mask, attn_mask, params.mask_strides, batch, head, row,
                           visible.q_length - 1, params.kv_length - 1);
#endif
#if BIAS
    reset_mask<TRANSPOSED>(rules.bias, attn_bias, params.bias_strides, batch, head, row,
                           visible.q_length - 1, params.kv_length - 1);
#endif
    return rules;
  }

#if SINK
  METAL_FUNC float sink_log2(int head) const thread { return base_2(learnable_sink[head]); }

  // Relative to a maximum in base 2.
  METAL_FUNC float sink_weight(int head, float row_max) const thread {
    return fast::exp2(base_2_less(learnable_sink[head], row_max));
  }
#endif
};
