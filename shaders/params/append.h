// Parameters of append_kv, and of the new rows of flash_decode.
#pragma once

#include "common.h"
#include "rope.h"

// The maximum number of new tokens of a tree, and their bytes in threadgroup memory (tree.h).
#define TREE_TOKENS 64
#define TREE_BYTES (TREE_TOKENS * 16)

// New rows of k and v, and the cache that they are written into. A page is a batch of the cache.
// Scales have strides like the cache's rows. Scales of fp8_e4m3 have no stride for rows.
struct AppendParams {
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides k_cache_strides;
  RowStrides v_cache_strides;
  RowStrides k_scale_strides;
  RowStrides v_scale_strides;
  TableStrides cos_strides;
  TableStrides sin_strides;
  int64_t block_table_stride;
  int32_t length;               // new rows of each sequence, or of all sequences (PACKED_NEW_K)
  int32_t capacity;             // maximum number of rows of a sequence
  int32_t cache_size;           // batches or pages of the cache
  int32_t table_rows;           // of cos and sin
  int32_t rotary_from_leftpad;  // 1: rows of cos and sin count from leftpad_k (LEFTPAD_K)
};

// From K_SCALE on, a slot is bound if its feature is on.
enum AppendBuffer {
  APPEND_K = 0,
  APPEND_V = 1,
  APPEND_K_CACHE = 2,
  APPEND_V_CACHE = 3,
  APPEND_PARAMS = 4,
  APPEND_K_SCALE = 5,
  APPEND_V_SCALE = 6,
  APPEND_SEQLENS = 7,
  APPEND_BLOCK_TABLE = 8,
  APPEND_CACHE_BATCH_IDX = 9,
  APPEND_LEFTPAD_K = 10,
  APPEND_Q = 11,
  APPEND_COS = 12,
  APPEND_SIN = 13,
};

// The maximum number of threads in a threadgroup of append_kv.
#define APPEND_THREADS 256

struct AppendKvParams {
  AppendParams append;
  RopeParams q;
  int32_t kv_heads;
  int32_t block_rows;         // new rows of k and v that a threadgroup writes
  int32_t block_tokens;       // tokens of q that a threadgroup rotates
  int32_t rotate_q_by_token;  // 1: token i of q is rotated by the i-th row after that of token 0
};
