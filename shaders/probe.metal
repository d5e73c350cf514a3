// Tests that the GPU reads and writes memory, has SIMD groups of 32 lanes with sums and shuffles,
// and lays out 8x8 matrices as tile.h says. csrc/runtime/probe.cpp compares the results.
#include "params/probe.h"
#include "tile.h"

// One SIMD group.
[[kernel, max_total_threads_per_threadgroup(SIMD_LANES)]] void probe(
    device float* values [[buffer(PROBE_VALUES)]], ushort lane [[thread_index_in_simdgroup]]) {
  const int row = fragment_row(lane);
  const int column = fragment_column(lane);
  // [8, 8], left(i, j) = 8i + j and right(i, j) = i - 3j: all numbers are exact.
  const Fragment<float> left =
      Fragment<float>(float(8 * row + column), float(8 * row + column + 1));
  const Fragment<half> right = Fragment<half>(half(row - 3 * column), half(row - 3 * column - 3));
  // [8, 8]
  Fragment<float> product = Fragment<float>(0.0f, 0.0f);
  mma(product, left, right);
  values[row * FRAGMENT + column] += product[0];
  values[row * FRAGMENT + column + 1] += product[1];

  const float number = float(lane);
  values[PROBE_PRODUCTS + lane] += simd_sum(number * number) + simd_shuffle_xor(number, 1);
}
