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

// [[buffer(i)]] slots of flash_fwd.
enum FlashFwdBuffer {
  FLASH_FWD_Q = 0,
  FLASH_FWD_K = 1,
  FLASH_FWD_V = 2,
  FLASH_FWD_OUT = 3,
  FLASH_FWD_LSE = 4,
  FLASH_FWD_PARAMS = 5,
};

struct FlashFwdParams {
  RowStrides q_strides;
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  int32_t q_length;
  int32_t kv_length;
  int32_t heads;           // query heads
  int32_t queries_per_kv;  // query heads that share one KV head
  int32_t causal_offset;   // query i sees key j iff j <= i + causal_offset (read if CAUSAL)
  float scale_log2;        // softmax_scale * log2(e)
};
