// Parameters of probe and probe_tensor.
#pragma once

#include "common.h"

enum ProbeBuffer { PROBE_VALUES = 0 };

// The buffer that probe adds to: a product of matrices [8, 8], then a value for each lane.
#define PROBE_PRODUCTS 64
#define PROBE_LANES 32

// The results of probe_tensor: 1 if the language has tensor operations; the slots that a lane has
// of a left operand, a right operand and a result; PROBE_TENSOR_ROW * row + column of each slot of
// each lane, in this order; and up to four products [16, 32].
#define PROBE_TENSOR_LANGUAGE 0
#define PROBE_TENSOR_CAPACITIES 1
#define PROBE_TENSOR_COORDINATES 4
#define PROBE_TENSOR_LANE_SLOTS 40
#define PROBE_TENSOR_ROW 64
#define PROBE_TENSOR_PRODUCTS 1284
#define PROBE_TENSOR_VALUES 3332

// The factors of these products and the initial results. All numbers are exact in the 11 bits to
// which tensor operations cut float32. Wide factors need all 11 bits.
constexpr int probe_tensor_wide(int i, int j) { return 1025 + (37 * i + 11 * j) % 1021; }
constexpr int probe_tensor_left(int row, int k, bool wide) {
  return wide ? probe_tensor_wide(row, k) : (112 * row + 7 * k) % 127 - 63;
}
constexpr int probe_tensor_right(int k, int column, bool wide) {
  return wide ? probe_tensor_wide(k, column) : (160 * k + 5 * column) % 61 - 30;
}
constexpr int probe_tensor_before(int row, int column) { return 40 * row - column; }
