// flash_decode.
#pragma once

#include "append.h"
#include "attention.h"

// Slots of flash_decode's own buffers: results, with splits each split's, and what is appended.
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
  int64_t lse_split_stride;
  int64_t tree_batch_stride;  // TREE
  int64_t tree_row_stride;    // TREE_MASK
  int32_t row_groups;         // threadgroups among which the rows of a KV head are dealt out
  int32_t list_groups;        // of one list of keys; without lists, all of them
  int32_t list_rows;          // queries of a KV head's heads that have one list (INDICES)
  AppendParams append;        // APPEND
  int32_t rotate_q_by_token;  // query i is rotated by i rows more than query 0 (APPEND)
};
