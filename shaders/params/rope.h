// Parameters of rope and rope_tables.
#pragma once

#include "common.h"

// Element strides of one (batch, head, row, column) operand of any layout.
struct ColumnStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
  int64_t column;
};

// Element strides of one (batch, row, column) table of any layout.
struct RotaryStrides {
  int64_t batch;
  int64_t row;
  int64_t column;
};

// In place, Q_OUT and K_OUT are not bound.
enum RopeBuffer {
  ROPE_Q = 0,
  ROPE_K = 1,
  ROPE_Q_OUT = 2,
  ROPE_K_OUT = 3,
  ROPE_COS = 4,
  ROPE_SIN = 5,
  ROPE_ROWS = 6,  // positions or seqlen_offsets (HAS_ROWS)
  ROPE_PARAMS = 7,
};

// The maximum number of threads in a threadgroup of rope or rope_tables.
#define ROPE_THREADS 256

struct RopeParams {
  ColumnStrides q_strides;
  ColumnStrides k_strides;
  ColumnStrides q_out_strides;
  ColumnStrides k_out_strides;
  RotaryStrides cos_strides;
  RotaryStrides sin_strides;
  int64_t rows_batch_stride;
  int64_t rows_token_stride;  // read if ROWS_ARE_POSITIONS
  int64_t seqlen_offset;      // read unless ROWS_ARE_POSITIONS
  int32_t table_rows;
  int32_t batch;
  int32_t q_heads;
  int32_t heads;  // of q and k together
  int32_t head_groups;
  int32_t length;
  int32_t head_dim;
  int32_t pairs;       // columns of cos and sin
  int32_t pair_units;  // threads of a row that rotate its pairs
  int32_t units;       // all threads of a row; threads from pair_units on copy the other columns
  float sine_sign;     // -1 rotates back
};

enum RopeTablesBuffer {
  ROPE_TABLES_INV_FREQ = 0,
  ROPE_TABLES_POSITIONS = 1,
  ROPE_TABLES_COS = 2,
  ROPE_TABLES_SIN = 3,
  ROPE_TABLES_PARAMS = 4,
};

struct RopeTablesParams {
  int64_t section_stride;  // of positions (section, batch, token)
  int64_t batch_stride;
  int64_t token_stride;
  int64_t inv_freq_stride;
  int32_t sections;
  int32_t batch;
  int32_t length;
  int32_t columns;
  float attention_factor;
};
