// Parameters of softmax and apply_causal_mask.
#pragma once

#include "common.h"

// In place, X and OUT are one tensor.
enum SoftmaxBuffer { SOFTMAX_X = 0, SOFTMAX_OUT = 1, SOFTMAX_PARAMS = 2 };

struct SoftmaxParams {
  RowDims x_rows;
  RowDims out_rows;
  int64_t x_stride;  // along the axis
  int64_t out_stride;
  uint32_t rows;
  uint32_t length;  // of the axis
};

enum CausalMaskBuffer { CAUSAL_MASK_SCORES = 0, CAUSAL_MASK_PARAMS = 1 };

struct CausalMaskParams {
  RowDims score_rows;  // the innermost dimension is the query
  int64_t key_stride;
  int64_t q_offset;  // -inf where key > query + q_offset
  uint32_t rows;
  uint32_t q_length;
  uint32_t kv_length;
};
