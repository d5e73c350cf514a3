// Parameters of index_scores.
#pragma once

#include "common.h"

enum IndexScoresBuffer {
  INDEX_SCORES_Q = 0,
  INDEX_SCORES_K = 1,
  INDEX_SCORES_WEIGHTS = 2,
  INDEX_SCORES_OUT = 3,
  INDEX_SCORES_PARAMS = 4,
};

// In the strides of q and weights, `row` is a head and `head` a query.
struct IndexScoresParams {
  RowStrides q_strides;
  RowStrides k_strides;
  RowStrides weight_strides;
  int64_t q_offset;  // the key index of query 0 (CAUSAL)
  int32_t heads;
  int32_t q_length;
  int32_t kv_length;
  float softmax_scale;
};
