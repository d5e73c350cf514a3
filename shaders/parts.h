// SIMD groups that share rows: each has its part of the columns, and of sums or of the scores.
#pragma once

#include "tile.h"

#ifndef COLUMN_SIMDGROUPS
#define COLUMN_SIMDGROUPS 1
#endif
#if COLUMN_SIMDGROUPS > 1
#define COLUMNS_SPLIT 1
#else
#define ROWS_STAGED 1
#endif

FEATURE(COLUMNS_SPLIT)
FEATURE(ROWS_STAGED)  // rows of q and dout once more, beside pairs (flash_bwd_dkv)

// Stores the SIMD group's part of a tile for the others that share its rows, in `tiles`,
// [SIMDGROUPS, ROWS * OTHERS, SIMD_LANES]. After a barrier they read it.
template <int ROWS, int OTHERS>
METAL_FUNC void store_part(thread const RegisterTile<float, ROWS, OTHERS>& tile,
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

// Of two SIMD groups with a part of each sum: both then have the same sums.
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

// The whole tile, of which each SIMD group has left PART_ROWS x PART_OTHERS fragments.
template <int PART_ROWS, int PART_OTHERS, int ROWS, int OTHERS>
METAL_FUNC void gather_parts(thread RegisterTile<float, ROWS, OTHERS>& tile,
                             const threadgroup Fragment<float>* tiles, ushort simdgroup,
                             ushort lane) {
  const ushort first = simdgroup / COLUMN_SIMDGROUPS * COLUMN_SIMDGROUPS;
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < OTHERS; j++) {
      const short part = i / PART_ROWS * (OTHERS / PART_OTHERS) + j / PART_OTHERS;
      const short place = i % PART_ROWS * PART_OTHERS + j % PART_OTHERS;
      tile.fragments[i][j] =
          tiles[((first + part) * PART_ROWS * PART_OTHERS + place) * SIMD_LANES + lane];
    }
  }
}
