// probe and probe_tensor.
#pragma once

#include "common.h"

// The [[buffer(i)]] slot of probe.
enum ProbeBuffer {
  PROBE_VALUES = 0,
};

// The buffer that probe adds to: a product of matrices [8, 8], then a value for each lane.
#define PROBE_PRODUCTS 64
#define PROBE_LANES 32

// The results of probe_tensor: 1 if the language has tensor operations; how many slots a lane has
// of a left operand, a right one and a result; of each lane, for all its slots in this order,
// PROBE_TENSOR_ROW * row + column; and up to four products [16, 32].
#define PROBE_TENSOR_LANGUAGE 0
#define PROBE_TENSOR_CAPACITIES 1
#define PROBE_TENSOR_COORDINATES 4
#define PROBE_TENSOR_LANE_SLOTS 40
#define PROBE_TENSOR_ROW 64
#define PROBE_TENSOR_PRODUCTS 1284
#define PROBE_TENSOR_VALUES 3332

// Factors of these products and what they are added to: all numbers are exact, also if tensor
// operations cut float32 to 11 bits, of which wide factors have all.
constexpr int probe_tensor_wide(int i, int j) { return 1025 + (37 * i + 11 * j) % 1021; }
constexpr int probe_tensor_left(int row, int k, bool wide) {
  return wide ? probe_tensor_wide(row, k) : (112 * row + 7 * k) % 127 - 63;
}
constexpr int probe_tensor_right(int k, int column, bool wide) {
  return wide ? probe_tensor_wide(k, column) : (160 * k + 5 * column) % 61 - 30;
}
constexpr int probe_tensor_before(int row, int column) { return 40 * row - column; }
