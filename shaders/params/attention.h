// Parameters that the forward and backward kernels of attention share, and parameters of flash_fwd.
#pragma once

#include "common.h"

// The inputs of all attention kernels. From CU_SEQLENS_Q on, a slot is bound if its feature is on.
enum FlashBuffer {
  FLASH_Q = 0,
  FLASH_K = 1,
  FLASH_V = 2,
  FLASH_PARAMS = 3,
  FLASH_CU_SEQLENS_Q = 4,
  FLASH_CU_SEQLENS_K = 5,
  FLASH_SEQUSED_K = 6,
  FLASH_LEFTPAD_K = 7,
  FLASH_MASK = 8,
  FLASH_BIAS = 9,
  FLASH_ALIBI_SLOPES = 10,
  FLASH_SINK = 11,
  FLASH_Q_COS = 12,
  FLASH_Q_SIN = 13,
  FLASH_K_COS = 14,
  FLASH_K_SIN = 15,
  FLASH_BLOCK_TABLE = 25,
  FLASH_CACHE_BATCH_IDX = 26,
  FLASH_K_SCALE = 27,
  FLASH_V_SCALE = 28,
  FLASH_INDICES = 29,
  FLASH_RNG_STATE = 30,  // the last slot of a kernel in Metal
};

// The results of flash_fwd.
enum FlashFwdBuffer { FLASH_FWD_OUT = 16, FLASH_FWD_LSE = 17 };

// The slots of flex attention, which uses none of the features above: captured tensors from
// FLEX_FIRST_CAPTURE on, and the lists of a BlockMask. With MASK_BLOCKS, FLEX_BLOCK_COUNTS and
// FLEX_BLOCK_INDICES hold the lists that mask_blocks has written.
enum FlexBuffer {
  FLEX_FIRST_CAPTURE = 4,
  FLEX_BLOCK_ORDER = 24,
  FLEX_BLOCK_COUNTS = 25,
  FLEX_BLOCK_INDICES = 26,
  FLEX_FULL_BLOCK_COUNTS = 27,
  FLEX_FULL_BLOCK_INDICES = 30,
};

// The maximum numbers of captured tensors of score_mod and mask_mod, and of all their dimensions.
#define FLEX_CAPTURES_MAX 12
#define FLEX_DIMENSIONS_MAX 24

// A window without a limit.
#define NO_WINDOW (-1)

// One list of blocks for each (batch, head, row of blocks). `key` is the stride along a list.
struct BlockListParams {
  RowStrides count_strides;
  MaskStrides index_strides;
  int32_t longest;  // the maximum number of entries of a list
};

// The strides and sizes of all captured tensors, concatenated, and a BlockMask's lists.
struct FlexParams {
  int64_t capture_strides[FLEX_DIMENSIONS_MAX];
  BlockListParams partial;  // or the lists of mask_blocks (MASK_BLOCKS)
  BlockListParams full;
  int32_t capture_sizes[FLEX_DIMENSIONS_MAX];
  int32_t order_batches;  // batch size of block_order: 1 or that of q (FLEX_ORDER)
  int32_t order_heads;
  int32_t existing_blocks;  // of keys (INDICES)
};

// The problem that forward and backward solve.
struct FlashParams {
  RowStrides q_strides;
  RowStrides k_strides;  // PAGE_SIZE: a batch is a page
  RowStrides v_strides;
  RowStrides k_scale_strides;
  RowStrides v_scale_strides;
  MaskStrides mask_strides;
  MaskStrides bias_strides;
  TableStrides q_cos_strides;
  TableStrides q_sin_strides;
  TableStrides k_cos_strides;
  TableStrides k_sin_strides;
  FlexParams flex;
  int64_t alibi_batch_stride;
  int64_t block_table_stride;
  int64_t q_offset;      // the key index of query 0, unless bottom_right
  int64_t window_left;   // visible keys before a query's position, or NO_WINDOW
  int64_t window_right;  // visible keys after a query's position, or NO_WINDOW
  int32_t batch;
  int32_t q_length;    // queries; PACKED_Q: the maximum over all sequences
  int32_t kv_length;   // keys; VARLEN: the maximum over all sequences
  int32_t q_total;     // rows of q in all sequences (PACKED_Q)
  int32_t kv_total;    // rows of k in all sequences (VARLEN); with a cache, capacity of a sequence
  int32_t cache_size;  // pages of k (PAGE_SIZE), or its batch size (CACHE_BATCH_IDX)
  int32_t new_keys;    // new rows of each sequence (APPEND), or of all (PACKED_NEW_K)
  int32_t queries_per_kv;  // query heads that share one KV head
  int32_t chunk;           // a query sees only keys of its own chunk (CHUNKED)
  int32_t bottom_right;    // 1: the last query is at the last key's position
  uint32_t last_dropped;   // the largest random word that drops a weight (DROPOUT)
  float softmax_scale;
  float scale_log2;      // softmax_scale * log2(e) (without SOFTCAP)
  float scale_over_cap;  // softmax_scale / softcap (SOFTCAP)
  float cap_log2;        // softcap * log2(e) (SOFTCAP)
  float keep_scale;      // 1 / (1 - dropout_p), or 0 where that is infinite (DROPOUT)
};

struct FlashFwdParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides lse_strides;
};
