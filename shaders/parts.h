// Exchanges between SIMD groups that share rows. Each has a part of the columns, and computes a
// part of every score or a part of the tile of scores.
#pragma once

#include "tile.h"

#ifndef COLUMN_SIMDGROUPS
#define COLUMN_SIMDGROUPS 1
#endif
#if COLUMN_SIMDGROUPS > 1
#define COLUMNS_SPLIT 1
#else
#define ROW_COPY_STAGED 1
#endif

FEATURE(COLUMNS_SPLIT)
FEATURE(ROW_COPY_STAGED)  // q and dout are staged as rows as well as in pairs (flash_bwd_dkv)

// Stores the SIMD group's part of a tile in `tiles`, [SIMDGROUPS, ROWS * COLUMNS, SIMD_LANES].
// After a barrier, the SIMD groups that share the rows read the part.
template <int ROWS, int COLUMNS>
METAL_FUNC void store_part(thread const RegisterTile<float, ROWS, COLUMNS>& tile,
                           threadgroup Fragment<float>* tiles, ushort simdgroup, ushort lane) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      tiles[(simdgroup * ROWS * COLUMNS + i * COLUMNS + j) * SIMD_LANES + lane] =
          tile.fragments[i][j];
    }
  }
}

// Adds the part of the other SIMD group that shares the rows, so that both have the same sums.
template <int ROWS, int COLUMNS>
METAL_FUNC void add_other_part(thread RegisterTile<float, ROWS, COLUMNS>& tile,
                               const threadgroup Fragment<float>* tiles, ushort simdgroup,
                               ushort lane) {
  const ushort other = simdgroup ^ 1;
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      tile.fragments[i][j] += tiles[(other * ROWS * COLUMNS + i * COLUMNS + j) * SIMD_LANES + lane];
    }
  }
}

// Loads the whole tile. Each SIMD group has stored PART_ROWS x PART_COLUMNS fragments of the tile.
template <int PART_ROWS, int PART_COLUMNS, int ROWS, int COLUMNS>
METAL_FUNC void gather_parts(thread RegisterTile<float, ROWS, COLUMNS>& tile,
                             const threadgroup Fragment<float>* tiles, ushort simdgroup,
                             ushort lane) {
  const ushort first = simdgroup / COLUMN_SIMDGROUPS * COLUMN_SIMDGROUPS;
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      const short part = i / PART_ROWS * (COLUMNS / PART_COLUMNS) + j / PART_COLUMNS;
      const short place = i % PART_ROWS * PART_COLUMNS + j % PART_COLUMNS;
      tile.fragments[i][j] =
          tiles[((first + part) * PART_ROWS * PART_COLUMNS + place) * SIMD_LANES + lane];
    }
  }
}
