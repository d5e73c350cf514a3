// What the backward kernels on 8x8 tiles own.
#pragma once

#include "products.h"

// The rows that a SIMD group owns of an operand, as the left factor.
#if ROWS_IN_THREADGROUP
template <typename Source, int COLUMNS, int ROWS = ROW_FRAGMENTS>
using OwnRows = KeptOperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT>;
#else
template <typename Source, int COLUMNS, int ROWS = ROW_FRAGMENTS>
using OwnRows = OperandTile<ELEMENT, Source, ROWS, COLUMNS / FRAGMENT, ROWS_IN_REGISTERS>;
#endif
