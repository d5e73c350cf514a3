// Products of register tiles with tiles in threadgroup memory. Each fragment that is loaded from
// threadgroup memory is used for all row fragments.
#pragma once

#include "operand.h"
#include "parts.h"

// result += left right^T over column fragments [first, last); `right` is staged as pairs of T.
template <typename T, int COLUMNS, int ROWS, int COLUMN_FRAGMENTS, typename Left>
METAL_FUNC void multiply_chain(thread RegisterTile<float, ROWS, COLUMN_FRAGMENTS>& result,
                               thread const Left& left, const threadgroup Fragment<T>* right_lane,
                               short first, short last) {
  UNROLL
  for (short d = first; d < last; d++) {
    Fragment<typename Left::Element> left_fragment[ROWS];
    UNROLL
    for (short i = 0; i < ROWS; i++) { left_fragment[i] = left.fragment_at(i, d); }
    UNROLL
    for (short j = 0; j < COLUMN_FRAGMENTS; j++) {
      const Fragment<T> right_fragment = transposed_fragment<T, COLUMNS>(right_lane, d, j);
      UNROLL
      for (short i = 0; i < ROWS; i++) {
        mma<typename Left::Element, T>(result.fragments[i][j], left_fragment[i], right_fragment);
      }
    }
  }
}

// result = left right^T, [ROWS * 8, COLUMN_FRAGMENTS * 8], over PART of COLUMNS columns.
template <typename T, int COLUMNS, int PART = COLUMNS, int ROWS, int COLUMN_FRAGMENTS,
          typename Left>
METAL_FUNC void multiply_transposed(thread RegisterTile<float, ROWS, COLUMN_FRAGMENTS>& result,
                                    thread const Left& left,
                                    const threadgroup Fragment<T>* right_lane) {
  constexpr short FRAGMENTS = PART / FRAGMENT;
  constexpr short CHAIN = CHAIN_COLUMNS / FRAGMENT;
  result.fill(0.0f);
  multiply_chain<T, COLUMNS>(result, left, right_lane, 0, FRAGMENTS < CHAIN ? FRAGMENTS : CHAIN);
  UNROLL
  for (short first = CHAIN; first < FRAGMENTS; first += CHAIN) {
    RegisterTile<float, ROWS, COLUMN_FRAGMENTS> chain;
    chain.fill(0.0f);
    multiply_chain<T, COLUMNS>(chain, left, right_lane, first,
                               min(FRAGMENTS, short(first + CHAIN)));
    result.add(chain);
  }
}

// sum = sum * corrections + weights rows, for PART of the COLUMNS columns of `rows`. corrections[i]
// is the factor of the lane's row in row fragment i. A block's products are summed separately
// first, so that the rounding error grows with the number of blocks only.
template <typename T, int COLUMNS, int PART = COLUMNS, int ROWS, int COLUMN_FRAGMENTS,
          typename Rows>
METAL_FUNC void accumulate(thread RegisterTile<float, ROWS, PART / FRAGMENT>& sum,
                           thread const float* corrections,
                           thread const RegisterTile<float, ROWS, COLUMN_FRAGMENTS>& weights,
                           Rows rows_lane) {
  UNROLL
  for (short d = 0; d < PART / FRAGMENT; d++) {
    RegisterTile<float, ROWS, 1> block;
    block.fill(0.0f);
    UNROLL
    for (short j = 0; j < COLUMN_FRAGMENTS; j++) {
      const Fragment<T> row = row_fragment<T, COLUMNS>(rows_lane, j, d);
      UNROLL
      for (short i = 0; i < ROWS; i++) {
        mma<float, T>(block.fragments[i][0], weights.fragments[i][j], row);
      }
    }
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      sum.fragments[i][d] = sum.fragments[i][d] * corrections[i] + block.fragments[i][0];
    }
  }
}

// sum += weights rows.
template <typename T, int COLUMNS, int PART = COLUMNS, int ROWS, int COLUMN_FRAGMENTS,
          typename Rows>
METAL_FUNC void accumulate(thread RegisterTile<float, ROWS, PART / FRAGMENT>& sum,
                           thread const RegisterTile<float, ROWS, COLUMN_FRAGMENTS>& weights,
                           Rows rows_lane) {
  float corrections[ROWS];
  UNROLL
  for (short i = 0; i < ROWS; i++) { corrections[i] = 1.0f; }
  accumulate<T, COLUMNS, PART>(sum, corrections, weights, rows_lane);
}
