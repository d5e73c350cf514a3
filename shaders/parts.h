// SIMD groups that share rows: each has its part of the columns, and of the scores.
#pragma once

#include "tile.h"

#ifndef COLUMN_SIMDGROUPS
#define COLUMN_SIMDGROUPS 1
#endif

// Leaves the SIMD group's part of a tile for the other that shares its rows, in `tiles`,
// [SIMDGROUPS, ROWS * OTHERS, SIMD_LANES]. A barrier later both have the same sum.
template <int ROWS, int OTHERS>
METAL_FUNC void leave_part(thread const RegisterTile<float, ROWS, OTHERS>& tile,
                           threadgroup Fragment<float>* tiles, ushort simdgroup, ushort lane) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < OTHERS; j++) {
      tiles[(simdgroup * ROWS * OTHERS + i * OTHERS + j) * SIMD_LANES + lane] =
          tile.fragments[i][j];
    }
  }
}

template <int ROWS, int OTHERS>
METAL_FUNC void add_other_part(thread RegisterTile<float, ROWS, OTHERS>& tile,
                               const threadgroup Fragment<float>* tiles, ushort simdgroup,
                               ushort lane) {
  const ushort other = simdgroup ^ 1;
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < OTHERS; j++) {
      tile.fragments[i][j] += tiles[(other * ROWS * OTHERS + i * OTHERS + j) * SIMD_LANES + lane];
    }
  }
}
