// Products of register tiles by Metal 4's tensor operations, on the matrix units of M5.
//
// matmul2d keeps its operands in cooperative tensors: each lane holds some elements, its slots. The
// layout depends on the GPU. The following tables are for GPU family 10 and products of (m, n, k) =
// (16, 32, 16), as in MLX (steel/attn/nax.h) and PyTorch (MppAttention.h). Before the tables are
// used, probe_tensor.metal compares them with the GPU's layout.
//
// With r = fragment_row(lane), u = fragment_column(lane) / 2 and e in 0..3:
//
//   left, [16, 16]                slot 4 i + e          row r + 8 i           column 4 u + e
//   right, [16, 32]               slot 8 h + 4 i + e    row r + 8 i           column 16 h + 4 u + e
//   right transposed, [32, 16]    slot 8 h + 4 i + e    row 16 h + r + 8 i    column 4 u + e
//   result, [16, 32]              slot 8 h + 4 i + e    row r + 8 i           column 16 h + 4 u + e
//
// A lane has the same rows as in 8x8 fragments, so the same shuffles reduce them. Columns are
// renamed: column 16 h + 4 u + e of 32 is column 8 u + 4 h + e of a span, and half h of a span is
// the k dimension of one product. So a lane holds unit u, 8 neighbouring columns that are one load
// (spans.h). If both factors have this order, sums over columns are the same.
#pragma once

#include "tile.h"

#if TENSOR_TILES

// A lane's rows of a left operand or a result, and the rows of a SIMD group.
constant constexpr int TENSOR_ROWS = 2;
constant constexpr int TENSOR_SIMDGROUP_ROWS = TENSOR_ROWS * FRAGMENT;
// A lane's fragments of half a span of a row.
constant constexpr int TENSOR_HALF = SPAN_FRAGMENTS / 2;
// A lane's slots of each operand.
constant constexpr int TENSOR_LEFT_SLOTS = 8;
constant constexpr int TENSOR_RIGHT_SLOTS = 16;
constant constexpr int TENSOR_RESULT_SLOTS = 16;

// A lane's fragments of a [16, 32] tile.
constant constexpr int TENSOR_FRAGMENTS = TENSOR_ROWS * SPAN_FRAGMENTS;

// Returns the values of columns `column` and `column + 1`. Lane i passes the `value` of column i.
METAL_FUNC Fragment<float> columns_of(float value, ushort column) {
  return Fragment<float>(simd_shuffle(value, column), simd_shuffle(value, ushort(column + 1)));
}

// A lane's fragments of an operand, in the order of slots.
template <typename T>
struct TensorLeft {
  Fragment<T> fragments[TENSOR_LEFT_SLOTS / LANE_COLUMNS];
};

template <typename T>
struct TensorRight {
  Fragment<T> fragments[TENSOR_RIGHT_SLOTS / LANE_COLUMNS];
};

// One half of a span as a left operand.
template <typename T>
METAL_FUNC TensorLeft<T> tensor_left(
    thread const RegisterTile<T, TENSOR_ROWS, SPAN_FRAGMENTS>& span, short half_span) {
  TensorLeft<T> left;
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    UNROLL
    for (short p = 0; p < TENSOR_HALF; p++) {
      left.fragments[TENSOR_HALF * i + p] = span.fragments[i][TENSOR_HALF * half_span + p];
    }
  }
  return left;
}

// result [16, 32] += left [16, 16] right [16, 32], or right [32, 16]^T if TRANSPOSED. Tensor
// operations cut float operands to 11 significant bits; products and sums are float32.
template <bool TRANSPOSED, typename A, typename B>
METAL_FUNC void tensor_mma(thread RegisterTile<float, TENSOR_ROWS, SPAN_FRAGMENTS>& result,
                           thread const TensorLeft<A>& left, thread const TensorRight<B>& right) {
  // true: relaxed precision, for which the tables hold. The default mode would not accumulate.
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, false, TRANSPOSED, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup> product;
  auto left_tensor = product.template get_left_input_cooperative_tensor<A, B, float>();
  auto right_tensor = product.template get_right_input_cooperative_tensor<A, B, float>();
  // decltype is of the calls because the variables' types have an address space in newer SDKs.
  using Left = decltype(product.template get_left_input_cooperative_tensor<A, B, float>());
  using Right = decltype(product.template get_right_input_cooperative_tensor<A, B, float>());
  auto sum = product.template get_destination_cooperative_tensor<Left, Right, float>();
  UNROLL
  for (short s = 0; s < TENSOR_LEFT_SLOTS; s++) {
    left_tensor[s] = left.fragments[s / LANE_COLUMNS][s % LANE_COLUMNS];
  }
  UNROLL
  for (short s = 0; s < TENSOR_RIGHT_SLOTS; s++) {
    right_tensor[s] = right.fragments[s / LANE_COLUMNS][s % LANE_COLUMNS];
  }
  // Slot s of the result: row s / 4 % 2, half s / 8, element s % 4.
  UNROLL
  for (short s = 0; s < TENSOR_RESULT_SLOTS; s++) {
    sum[s] = result.fragments[s / 4 % 2][s / 8 * TENSOR_HALF + s % 4 / 2][s % 2];
  }
  product.run(left_tensor, right_tensor, sum);
  UNROLL
  for (short s = 0; s < TENSOR_RESULT_SLOTS; s++) {
    result.fragments[s / 4 % 2][s / 8 * TENSOR_HALF + s % 4 / 2][s % 2] = sum[s];
  }
}

// A float32's sign, exponent and 11 significant bits, one of them implicit.
constant constexpr uint KEPT_BITS = 0xffffe000u;

// Truncates a float operand to the bits that tensor operations keep. NaN stays NaN.
METAL_FUNC Fragment<float> cut(Fragment<float> x) {
  return as_type<Fragment<float>>(as_type<vec<uint, LANE_COLUMNS>>(x) & KEPT_BITS);
}

// A float32's sign and exponent.
constant constexpr uint SCALE_BITS = 0xff800000u;

// An operand that a product does not round. Operands of 16 bits have at most 11 significant bits.
template <typename T>
METAL_FUNC Fragment<T> rounded_operand(Fragment<T> x) {
  return x;
}

// The nearest number of 11 bits: half of the last bit is added before the cut. Keeps NaN and inf.
template <>
METAL_FUNC Fragment<float> rounded_operand<float>(Fragment<float> x) {
  const Fragment<float> scale =
      as_type<Fragment<float>>(as_type<vec<uint, LANE_COLUMNS>>(x) & SCALE_BITS);
  return cut(scale * unit_roundoff<half>() + x);
}

#endif
