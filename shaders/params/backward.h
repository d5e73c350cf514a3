// Parameters of the backward kernels.
#pragma once

#include "attention.h"

// The buffers of the backward kernels; each kernel binds those that it declares.
enum FlashBwdBuffer {
  FLASH_BWD_OUT = 16,
  FLASH_BWD_LSE = 17,
  FLASH_BWD_DOUT = 18,
  FLASH_BWD_DLSE = 19,
  FLASH_BWD_DELTA = 20,
  FLASH_BWD_DQ = 21,
  FLASH_BWD_DK = 22,
  FLASH_BWD_DV = 23,
  FLASH_BWD_DBIAS = 24,
  FLASH_BWD_NORMALISERS = 28,
  FLASH_BWD_EXACT_DELTA = 29,
};

struct FlashBwdParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides dout_strides;
  RowStrides dq_strides;
  RowStrides dk_strides;
  RowStrides dv_strides;
  RowStrides lse_strides;  // of delta, too
  RowStrides dlse_strides;
  int64_t dk_split_stride;  // between parts of dk (HEAD_SPLITS)
  int64_t dv_split_stride;
};

enum FlashBwdSumBuffer { FLASH_BWD_SUM_PARTS = 0, FLASH_BWD_SUM_RESULT = 1 };

struct FlashBwdSumParams {
  RowStrides part_strides;
  RowStrides sum_strides;
  int64_t split_stride;  // between two parts
  int32_t splits;
  int32_t rows;  // of one head of one batch
};

// The gradient of a bias or of ALiBi's slopes. A dimension is shared if the bias broadcasts there.
struct FlashBwdBiasParams {
  FlashParams problem;
  RowStrides dout_strides;
  RowStrides lse_strides;  // of delta, too
  MaskStrides dbias_strides;
  int64_t split_stride;  // between the results of two splits
  int64_t split_tiles;   // tiles of scores of one split
  int64_t shared_tiles;  // tiles of scores that share one tile of the bias
  int32_t splits;
  int32_t heads;      // of q
  int32_t own_heads;  // of the bias: 1 if it broadcasts over heads
  int32_t batches_shared;
  int32_t heads_shared;
};

// The gradient of a captured tensor of score_mod. Tiles of queries are numbered by (batch, head,
// tile); tiles vary fastest. A dimension is owned if no two positions use the same element.
struct FlashBwdCaptureParams {
  FlashParams problem;
  RowStrides dout_strides;
  RowStrides lse_strides;  // of delta, too
  int64_t elements;        // of the captured tensor
  int64_t split_tiles;     // tiles of one threadgroup
  int64_t shared_tiles;    // tiles along the dimensions that are not owned
  int32_t heads;           // of q
  int32_t q_tiles;
  int32_t batches_owned;
  int32_t heads_owned;
};
