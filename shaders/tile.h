// Register and threadgroup tiles made of 8x8 fragments.
//
// A SIMD group holds an 8x8 fragment with two neighbouring columns of one row in each lane. Lane l
// has row (l/4 & 4) + (l/2 % 4) and columns 2c and 2c + 1, where c = (l/4 & 2) + (l % 2):
//
//              columns 0-1  2-3  4-5  6-7
//       row 0   lane    0    1    8    9
//       row 1           2    3   10   11
//       row 2           4    5   12   13
//       row 3           6    7   14   15
//       row 4          16   17   24   25
//       row 5          18   19   26   27
//       row 6          20   21   28   29
//       row 7          22   23   30   31
#pragma once

#include "features.h"
#include "params/common.h"

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

// Rows and columns of a fragment, and the columns that a lane holds.
constant constexpr int FRAGMENT = 8;
constant constexpr int LANE_COLUMNS = 2;
constant constexpr int SIMD_LANES = 32;
// The columns of a span, and its fragments (spans.h).
constant constexpr int SPAN_COLUMNS = 32;
constant constexpr int SPAN_FRAGMENTS = SPAN_COLUMNS / FRAGMENT;

// An offset in a tensor, in elements. 32 bits take one register, and a load instruction adds them
// to the tensor's address.
using Offset = conditional_t<LONG_OFFSETS, int64_t, uint>;

constant constexpr float LOWEST_FLOAT = -3.402823466e+38f;

// Fragments that hold `columns` columns.
constexpr int fragments(int columns) { return (columns + FRAGMENT - 1) / FRAGMENT; }

// Half the distance from 1 to the next larger number of a type.
template <typename T>
constexpr float unit_roundoff();
template <>
constexpr float unit_roundoff<float>() {
  return 5.960464478e-8f;
}
template <>
constexpr float unit_roundoff<half>() {
  return 4.8828125e-4f;
}
template <>
constexpr float unit_roundoff<bfloat>() {
  return 3.90625e-3f;
}

// A lane's share of an 8x8 fragment.
template <typename T>
using Fragment = vec<T, LANE_COLUMNS>;

// The distance from a lane's fragment 0 to its fragment j in a row of spans, in columns: four
// fragments are 8 neighbouring columns of a span.
constexpr int span_offset(short j) { return j / 4 * SPAN_COLUMNS + j % 4 * LANE_COLUMNS; }

// The same distance in a row of a tile. Rows of tensor tiles are rows of spans.
constexpr int column_offset(short j) { return TENSOR_TILES ? span_offset(j) : j * FRAGMENT; }

METAL_FUNC ushort fragment_row(ushort lane) { return ((lane / 4) & 4) + ((lane / 2) % 4); }

METAL_FUNC ushort fragment_column(ushort lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

// A lane's first column of a tile; in tensor tiles, the first column of its unit.
METAL_FUNC ushort lane_column(ushort lane) {
  return fragment_column(lane) * (TENSOR_TILES ? 4 : 1);
}

// A lane that has this row of a fragment.
METAL_FUNC ushort row_lane(ushort row) { return (row & 4) * 4 + row % 4 * 2; }

// A lane that has this column, if it is even.
METAL_FUNC ushort column_lane(ushort column) { return (column & 4) * 2 + column % 4 / 2; }

// Each lane passes its row's number. Returns the numbers of the rows whose indices are the lane's
// columns. Each shuffle exchanges one bit of the row: simd_shuffle from any lane is slow on M1.
template <typename T>
METAL_FUNC vec<T, 2> column_numbers(T number, ushort lane) {
  const ushort row = fragment_row(lane);
  const ushort column = fragment_column(lane);
  const T far = simd_shuffle_xor(number, row_lane(4));
  number = (row & 4) == (column & 4) ? number : far;
  const T near = simd_shuffle_xor(number, row_lane(2));
  number = (row & 2) == (column & 2) ? number : near;
  const T other = simd_shuffle_xor(number, row_lane(1));
  return row % 2 == 0 ? vec<T, 2>(number, other) : vec<T, 2>(other, number);
}

// The sum over a fragment's rows, for each of the lane's columns.
template <typename T>
METAL_FUNC T fragment_column_sum(T x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

// c [8, 8] += a [8, 8] * b [8, 8], accumulated in float32.
template <typename A, typename B>
METAL_FUNC void mma(thread Fragment<float>& c, Fragment<A> a, Fragment<B> b) {
  simdgroup_matrix<A, 8, 8> a_matrix;
  simdgroup_matrix<B, 8, 8> b_matrix;
  simdgroup_matrix<float, 8, 8> c_matrix;
  reinterpret_cast<thread Fragment<A>&>(a_matrix.thread_elements()) = a;
  reinterpret_cast<thread Fragment<B>&>(b_matrix.thread_elements()) = b;
  reinterpret_cast<thread Fragment<float>&>(c_matrix.thread_elements()) = c;
  simdgroup_multiply_accumulate(c_matrix, a_matrix, b_matrix, c_matrix);
  c = reinterpret_cast<thread Fragment<float>&>(c_matrix.thread_elements());
}

// A SIMD group's tile in registers: [ROWS * 8, COLUMNS * 8].
template <typename T, int ROWS, int COLUMNS>
struct RegisterTile {
  Fragment<T> fragments[ROWS][COLUMNS];

  METAL_FUNC void fill(T value) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) { fragments[i][j] = Fragment<T>(value, value); }
    }
  }

  METAL_FUNC void multiply(thread const RegisterTile& other) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) { fragments[i][j] *= other.fragments[i][j]; }
    }
  }

  METAL_FUNC void scale(T factor) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) { fragments[i][j] *= factor; }
    }
  }

  METAL_FUNC void add(thread const RegisterTile& other) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) { fragments[i][j] += other.fragments[i][j]; }
    }
  }
};

// The number of elements in a chunk of 16 bytes.
template <typename T>
constexpr int chunk_elements() {
  return int(sizeof(uint4) / sizeof(T));
}

// 32 bits of the row at `row`, from `column` on. Columns from COLUMNS on are 0.
template <int COLUMNS>
METAL_FUNC uint load_word(const device float* tensor, Offset row, int column) {
  return COLUMNS % FRAGMENT == 0 || column < COLUMNS ? as_type<uint>(tensor[row + column]) : 0;
}

template <int COLUMNS, typename T>
METAL_FUNC uint load_word(const device T* tensor, Offset row, int column) {
  const device ushort* bits = reinterpret_cast<const device ushort*>(tensor);
  const bool whole = COLUMNS % FRAGMENT == 0;
  const uint low = whole || column < COLUMNS ? bits[row + column] : 0;
  const uint high = whole || column + 1 < COLUMNS ? bits[row + column + 1] : 0;
  return low | (high << 16);
}

// 16 bytes of the row at `row`, from `column` on. Columns from COLUMNS on are 0. Without
// WIDE_LOADS, rows are not aligned to 16 bytes.
template <int COLUMNS, typename T>
METAL_FUNC uint4 load_chunk(const device T* tensor, Offset row, int column) {
  if (WIDE_LOADS) { return *reinterpret_cast<const device uint4*>(tensor + (row + column)); }
  uint4 chunk;
  UNROLL
  for (short i = 0; i < 4; i++) {
    chunk[i] = load_word<COLUMNS>(tensor, row, column + i * int(sizeof(uint) / sizeof(T)));
  }
  return chunk;
}

// Zips two rows' chunks, a0 a1 .. and b0 b1 .., into low:high = a0 b0 a1 b1 ..
template <typename T>
METAL_FUNC void zip_pairs(uint4 a, uint4 b, thread uint4& low, thread uint4& high) {
  const uint4 even = (a & 0xffffu) | (b << 16);
  const uint4 odd = (a >> 16) | (b & 0xffff0000u);
  low = uint4(even.x, odd.x, even.y, odd.y);
  high = uint4(even.z, odd.z, even.w, odd.w);
}

template <>
METAL_FUNC void zip_pairs<float>(uint4 a, uint4 b, thread uint4& low, thread uint4& high) {
  low = uint4(a.x, b.x, a.y, b.y);
  high = uint4(a.z, b.z, a.w, b.w);
}

// Elements 2j and 2j + 1 of a chunk.
template <typename T>
METAL_FUNC Fragment<T> chunk_pair(uint4 chunk, short j) {
  return as_type<Fragment<T>>(chunk[j]);
}

template <>
METAL_FUNC Fragment<float> chunk_pair<float>(uint4 chunk, short j) {
  return Fragment<float>(as_type<float>(chunk[2 * j]), as_type<float>(chunk[2 * j + 1]));
}

template <typename T>
METAL_FUNC void set_chunk_pair(thread uint4& chunk, short j, Fragment<T> pair) {
  chunk[j] = as_type<uint>(pair);
}

template <>
METAL_FUNC void set_chunk_pair<float>(thread uint4& chunk, short j, Fragment<float> pair) {
  chunk[2 * j] = as_type<uint>(pair.x);
  chunk[2 * j + 1] = as_type<uint>(pair.y);
}
