// Parameters of merge_state and merge_splits.
#pragma once

#include "common.h"

// In place, OUT and LSE hold state a, and OUT_A and LSE_A are not bound.
enum MergeStateBuffer {
  MERGE_STATE_OUT_A = 0,
  MERGE_STATE_LSE_A = 1,
  MERGE_STATE_OUT_B = 2,
  MERGE_STATE_LSE_B = 3,
  MERGE_STATE_OUT = 4,
  MERGE_STATE_LSE = 5,
  MERGE_STATE_PARAMS = 6,
  MERGE_STATE_MASK = 7,
};

// Rows are numbered in the order (batch, head, row), where the row varies fastest.
struct MergeShape {
  uint32_t rows;    // of all batches and heads
  uint32_t heads;   // of a batch
  uint32_t length;  // rows of a head
  int32_t columns;
};

struct MergeStateParams {
  RowStrides out_a_strides;
  RowStrides lse_a_strides;
  RowStrides out_b_strides;
  RowStrides lse_b_strides;
  RowStrides out_strides;
  RowStrides lse_strides;
  RowStrides mask_strides;
  MergeShape shape;
};

// The maximum number of threads in a threadgroup of merge_state, one for each column.
#define MERGE_STATE_THREADS 512

enum MergeSplitsBuffer {
  MERGE_SPLITS_PARTIAL_OUT = 0,
  MERGE_SPLITS_PARTIAL_LSE = 1,
  MERGE_SPLITS_SINK = 2,
  MERGE_SPLITS_OUT = 3,
  MERGE_SPLITS_LSE = 4,
  MERGE_SPLITS_PARAMS = 5,
};

struct MergeSplitsParams {
  RowStrides out_strides;
  RowStrides lse_strides;
  MergeShape shape;
  int32_t splits;
};

// The SIMD groups of a threadgroup of merge_splits, and the lanes that share the row of one split.
#define MERGE_SPLITS_SIMDGROUPS 4
#define MERGE_SPLITS_COLUMN_LANES 8
