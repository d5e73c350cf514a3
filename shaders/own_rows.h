// What the backward kernels on 8x8 tiles own.
#pragma once

#include "products.h"

// The rows that a SIMD group owns of an operand, as the left factor.
#if ROWS_IN_THREADGROUP
template <typename Source, int COLUMNS>
using OwnRows = KeptOperandTile<ELEMENT, Source, ROW_FRAGMENTS, COLUMNS / FRAGMENT>;
#else
template <typename Source, int COLUMNS>
using OwnRows = OperandTile<ELEMENT, Source, ROW_FRAGMENTS, COLUMNS / FRAGMENT, ROWS_IN_REGISTERS>;
#endif
