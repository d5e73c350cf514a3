// Rows of q, k, v and dout in the backward kernels on 8x8 tiles.
#pragma once

#include "products.h"

constant constexpr int QK_COLUMNS = fragments(HEAD_DIM_QK) * FRAGMENT;
constant constexpr int V_COLUMNS = fragments(HEAD_DIM_V) * FRAGMENT;

// Bytes of a tile in whose place another one lies too, and of one with a place of its own.
constexpr int with_shared(int bytes, int other) {
  return TILES_SHARED && other > bytes ? other : bytes;
}
constexpr int apart(int bytes) { return TILES_SHARED ? 0 : bytes; }

using Pair = Fragment<ELEMENT>;

// The rows that a SIMD group owns of an operand, as the left factor.
template <typename Source, int COLUMNS, int ROWS = ROW_FRAGMENTS>
using OwnRows =
    conditional_t<ROWS_IN_THREADGROUP, KeptOperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT>,
                  OperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT, ROWS_IN_REGISTERS>>;
