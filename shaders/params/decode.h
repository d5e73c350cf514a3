// Parameters of flash_decode.
#pragma once

#include "append.h"
#include "attention.h"

// The buffers that only flash_decode has: results of each split, and inputs of APPEND and TREE.
enum FlashDecodeBuffer {
  FLASH_DECODE_OUT = 16,
  FLASH_DECODE_LSE = 17,
  FLASH_DECODE_NEW_K = 18,
  FLASH_DECODE_NEW_V = 19,
  FLASH_DECODE_CU_SEQLENS_K_NEW = 20,
  FLASH_DECODE_PARENTS = 21,
  FLASH_DECODE_TREE_MASK = 22,
};

struct FlashDecodeParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides lse_strides;
  int64_t out_split_stride;
  int64_t lse_sum_offset;     // from the maxima of all splits of a row to their sums (SPLIT)
  int64_t tree_batch_stride;  // TREE
  int64_t tree_row_stride;    // TREE_MASK
  int32_t row_groups;         // threadgroups that share the rows of a KV head
  int32_t list_groups;        // row groups that have one list of keys (INDICES), or all row groups
  int32_t list_rows;          // rows of a KV head that have one list of keys (INDICES)
  AppendParams append;        // APPEND
  int32_t rotate_q_by_token;  // 1: query i is rotated by the i-th row after query 0's (APPEND)
};
