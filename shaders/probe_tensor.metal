// Tests that tensor operations lay out their operands as tensor_tile.h says.
// csrc/runtime/probe_tensor.cpp compares the results. FLOAT32: 1 if both operands are float32, 0 if
// at least one operand has 16 bits. Some GPUs may compile only one of these two variants.
#if HAS_TENSOR_OPERATIONS
#define TENSOR_TILES 1
#endif

#include "params/probe.h"
#include "tensor_tile.h"

#if TENSOR_TILES

// Writes the coordinates of an operand's slots to the lane's slots from number `first` on.
template <int SLOTS, typename Tensor>
METAL_FUNC void write_coordinates(device float* lane_slots, thread Tensor& operand, int first) {
  UNROLL
  for (short s = 0; s < SLOTS; s++) {
    if (s < int(operand.get_capacity()) && operand.is_valid_element(s)) {
      const auto at = operand.get_multidimensional_index(s);
      lane_slots[first + s] = float(PROBE_TENSOR_ROW * int(at[1]) + int(at[0]));
    }
  }
}

template <typename T>
METAL_FUNC void write_layout(device float* values, ushort lane) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, false, false, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  using Left = decltype(product.template get_left_input_cooperative_tensor<T, T, float>());
  using Right = decltype(product.template get_right_input_cooperative_tensor<T, T, float>());
  auto result = product.template get_destination_cooperative_tensor<Left, Right, float>();
  if (lane == 0) {
    values[PROBE_TENSOR_CAPACITIES] = float(int(left.get_capacity()));
    values[PROBE_TENSOR_CAPACITIES + 1] = float(int(right.get_capacity()));
    values[PROBE_TENSOR_CAPACITIES + 2] = float(int(result.get_capacity()));
  }
  device float* lane_slots = values + PROBE_TENSOR_COORDINATES + lane * PROBE_TENSOR_LANE_SLOTS;
  write_coordinates<TENSOR_LEFT_SLOTS>(lane_slots, left, 0);
  write_coordinates<TENSOR_RIGHT_SLOTS>(lane_slots, right, TENSOR_LEFT_SLOTS);
  write_coordinates<TENSOR_RESULT_SLOTS>(lane_slots, result,
                                         TENSOR_LEFT_SLOTS + TENSOR_RIGHT_SLOTS);
}

// Writes a product whose operands and result are laid out as in tensor_tile.h.
template <bool TRANSPOSED, typename A, typename B>
METAL_FUNC void write_product(device float* values, bool wide_left, bool wide_right, ushort lane) {
  const int row = fragment_row(lane);
  const int column = fragment_column(lane) * 2;
  TensorLeft<A> left;  // [16, 16]
  UNROLL
  for (short s = 0; s < TENSOR_LEFT_SLOTS; s++) {
    left.fragments[s / 2][s % 2] =
        A(float(probe_tensor_left(row + s / 4 * 8, column + s % 4, wide_left)));
  }
  TensorRight<B> right;  // [16, 32]
  UNROLL
  for (short s = 0; s < TENSOR_RIGHT_SLOTS; s++) {
    const int stored_row = row + s / 4 % 2 * 8 + (TRANSPOSED ? s / 8 * 16 : 0);
    const int stored_column = column + s % 4 + (TRANSPOSED ? 0 : s / 8 * 16);
    right.fragments[s / 2][s % 2] =
        B(float(TRANSPOSED ? probe_tensor_right(stored_column, stored_row, wide_right)
                           : probe_tensor_right(stored_row, stored_column, wide_right)));
  }
  RegisterTile<float, TENSOR_ROWS, SPAN_FRAGMENTS> result;  // [16, 32]
  UNROLL
  for (short s = 0; s < TENSOR_RESULT_SLOTS; s++) {
    result.fragments[s / 8][s % 8 / 2][s % 2] =
        float(probe_tensor_before(row + s / 8 * 8, column + s % 8 / 4 * 16 + s % 4));
  }
  tensor_mma<TRANSPOSED>(result, left, right);
  UNROLL
  for (short s = 0; s < TENSOR_RESULT_SLOTS; s++) {
    values[(row + s / 8 * 8) * SPAN_COLUMNS + column + s % 8 / 4 * 16 + s % 4] =
        result.fragments[s / 8][s % 8 / 2][s % 2];
  }
}

#endif

// One SIMD group.
[[kernel, max_total_threads_per_threadgroup(SIMD_LANES)]] void probe_tensor(
    device float* values [[buffer(PROBE_VALUES)]], ushort lane [[thread_index_in_simdgroup]]) {
  if (lane == 0) { values[PROBE_TENSOR_LANGUAGE] = TENSOR_TILES ? 1.0f : 0.0f; }
#if TENSOR_TILES
  device float* products = values + PROBE_TENSOR_PRODUCTS;
  constexpr int SIZE = TENSOR_SIMDGROUP_ROWS * SPAN_COLUMNS;
#if FLOAT32
  write_layout<float>(values, lane);
  write_product<true, float, float>(products, false, true, lane);
  write_product<false, float, float>(products + SIZE, true, false, lane);
#else
  write_layout<half>(values, lane);
  write_product<true, half, half>(products, false, false, lane);
  write_product<true, bfloat, bfloat>(products + SIZE, false, false, lane);
  write_product<false, float, half>(products + 2 * SIZE, true, false, lane);
  write_product<false, float, bfloat>(products + 3 * SIZE, true, false, lane);
#endif
#endif
}
