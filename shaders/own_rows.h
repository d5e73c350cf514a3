// Rows of q, k, v and dout in the backward kernels on 8x8 tiles.
#pragma once

#include "products.h"

constant constexpr int QK_COLUMNS = fragments(HEAD_DIM_QK) * FRAGMENT;
constant constexpr int V_COLUMNS = fragments(HEAD_DIM_V) * FRAGMENT;

// The bytes of the array of one or two tiles (TILES_SHARED), and of the second tile's own array.
constexpr int with_shared(int bytes, int other) {
  return TILES_SHARED && other > bytes ? other : bytes;
}
constexpr int apart(int bytes) { return TILES_SHARED ? 0 : bytes; }

using Pair = Fragment<ELEMENT>;

// A SIMD group's rows of an operand, as the left factor of products.
template <typename Source, int COLUMNS, int ROWS = ROW_FRAGMENTS>
using OwnRows =
    conditional_t<ROWS_IN_THREADGROUP, KeptOperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT>,
                  OperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT, ROWS_IN_REGISTERS>>;
