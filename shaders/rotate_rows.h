// Rotates rows of q or k from memory to memory. A thread rotates VECTOR (1, 2 or 4) pairs of
// columns of one token, with the same cos and sin in all heads.
//
// The including kernel defines ELEMENT, TABLE_ELEMENT, INTERLEAVED and VECTOR.
#pragma once

#include "params/rope.h"
#include "rope.h"

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int UNIT_COLUMNS = 2 * VECTOR;
// The elements of a vector load or store. Metal has no vectors of one element.
constant constexpr int WIDTH = VECTOR > 1 ? VECTOR : 2;

// Loads VECTOR neighbouring elements, which are aligned as one vector.
template <typename T>
METAL_FUNC void load_vector(const device T* first, thread float* values) {
  if (VECTOR == 1) {
    values[0] = float(*first);
    return;
  }
  const vec<T, WIDTH> loaded = *reinterpret_cast<const device vec<T, WIDTH>*>(first);
  UNROLL
  for (short i = 0; i < VECTOR; i++) { values[i] = float(loaded[i]); }
}

template <typename T>
METAL_FUNC void store_vector(device T* first, thread const float* values) {
  if (VECTOR == 1) {
    *first = T(values[0]);
    return;
  }
  vec<T, WIDTH> stored;
  UNROLL
  for (short i = 0; i < VECTOR; i++) { stored[i] = T(values[i]); }
  *reinterpret_cast<device vec<T, WIDTH>*>(first) = stored;
}

// The first columns of the two vectors that hold a thread's pairs.
struct PairColumns {
  int first;
  int second;
};

METAL_FUNC PairColumns pair_columns(int pair, int pairs) {
  const int first = rotary_x_column(pair, INTERLEAVED);
  return {first, INTERLEAVED ? first + VECTOR : rotary_y_column(pair, pairs, false)};
}

// cos and sin of a thread's pairs of one token.
struct PairAngles {
  float cosines[VECTOR];
  float sines[VECTOR];

  // From row `row` of the batch's tables.
  METAL_FUNC void load(const device TABLE_ELEMENT* cos_table, const device TABLE_ELEMENT* sin_table,
                       int64_t batch, int64_t row, int pair, constant RopeParams& params) thread {
    if (row >= 0 && row < params.table_rows) {
      load_vector(cos_table + batch * params.cos_strides.batch + row * params.cos_strides.row +
                      pair * params.cos_strides.column,
                  cosines);
      load_vector(sin_table + batch * params.sin_strides.batch + row * params.sin_strides.row +
                      pair * params.sin_strides.column,
                  sines);
    } else {
      UNROLL
      for (short i = 0; i < VECTOR; i++) {
        cosines[i] = NAN;
        sines[i] = NAN;
      }
    }
  }
};

// Rotates the pairs of one row into another row, or in place.
METAL_FUNC void rotate_pairs(const device ELEMENT* row, int64_t stride, device ELEMENT* out_row,
                             int64_t out_stride, PairColumns columns,
                             thread const PairAngles& angles, constant RopeParams& params) {
  float values[UNIT_COLUMNS];
  load_vector(row + columns.first * stride, values);
  load_vector(row + columns.second * stride, values + VECTOR);
  UNROLL
  for (short i = 0; i < VECTOR; i++) {
    const short x = rotary_x_column(i, INTERLEAVED);
    const short y = rotary_y_column(i, VECTOR, INTERLEAVED);
    const float2 rotated =
        rotate_pair(values[x], values[y], angles.cosines[i], params.sine_sign * angles.sines[i]);
    values[x] = rotated.x;
    values[y] = rotated.y;
  }
  store_vector(out_row + columns.first * out_stride, values);
  store_vector(out_row + columns.second * out_stride, values + VECTOR);
}
