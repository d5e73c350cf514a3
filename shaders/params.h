// Every argument struct and buffer slot: the whole contract between host and shader.
// Included by the shaders and by csrc/, so it holds plain fixed-width fields only, widest first.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#else
#include <cstdint>
#endif

// Metal's limit for one threadgroup on every Apple GPU.
#define THREADGROUP_MEMORY_BYTES 32768

// Dot products of more columns are summed in two chains, which halves their rounding error.
#define CHAIN_COLUMNS 128

// Leading dimension of a threadgroup tile that is `columns` (a multiple of 8) wide: an odd multiple
// of 8, so that the 32 lanes of a fragment load touch 32 different banks.
constexpr int padded(int columns) { return columns | 8; }

// Element strides of one (batch, head, row, column) operand; the last dimension has stride 1.
struct RowStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Element strides of a mask or bias that broadcasts to (batch, head, query, key): 0 where it does.
struct MaskStrides {
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

// Element strides of a (batch, row, column) table; the last dimension has stride 1.
struct TableStrides {
  int64_t batch;
  int64_t row;
};

// [[buffer(i)]] slots of flash_fwd. From CU_SEQLENS_Q on, a slot is bound if its feature is on.
enum FlashFwdBuffer {
  FLASH_FWD_Q = 0,
  FLASH_FWD_K = 1,
  FLASH_FWD_V = 2,
  FLASH_FWD_OUT = 3,
  FLASH_FWD_LSE = 4,
  FLASH_FWD_PARAMS = 5,
  FLASH_FWD_CU_SEQLENS_Q = 6,
  FLASH_FWD_CU_SEQLENS_K = 7,
  FLASH_FWD_SEQUSED_K = 8,
  FLASH_FWD_LEFTPAD_K = 9,
  FLASH_FWD_MASK = 10,
  FLASH_FWD_BIAS = 11,
  FLASH_FWD_ALIBI_SLOPES = 12,
  FLASH_FWD_SINK = 13,
  FLASH_FWD_Q_COS = 14,
  FLASH_FWD_Q_SIN = 15,
  FLASH_FWD_K_COS = 16,
  FLASH_FWD_K_SIN = 17,
};

// A window without a limit.
#define NO_WINDOW (-1)

struct FlashFwdParams {
  RowStrides q_strides;
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  RowStrides lse_strides;
  MaskStrides mask_strides;
  MaskStrides bias_strides;
  TableStrides q_cos_strides;
  TableStrides q_sin_strides;
  TableStrides k_cos_strides;
  TableStrides k_sin_strides;
  int64_t alibi_batch_stride;
  int64_t q_offset;      // the key index at which query 0 stands, unless bottom_right
  int64_t window_left;   // keys before a query's position that it sees, or NO_WINDOW
  int64_t window_right;  // and behind
  int32_t batch;
  int32_t q_length;        // VARLEN: at most, of any sequence
  int32_t kv_length;       // VARLEN: at most, of any sequence
  int32_t q_total;         // rows of q in all sequences (VARLEN)
  int32_t kv_total;        // rows of k in all sequences (VARLEN)
  int32_t queries_per_kv;  // query heads that share one KV head
  int32_t chunk;           // keys a query sees are of its own chunk (CHUNK)
  int32_t bottom_right;    // the last query stands at the last key
  float scale_log2;        // softmax_scale * log2(e) (without SOFTCAP)
  float scale_over_cap;    // softmax_scale / softcap (SOFTCAP)
  float cap_log2;          // softcap * log2(e) (SOFTCAP)
};
