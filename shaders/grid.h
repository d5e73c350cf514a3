// Which tile of rows a threadgroup owns.
#pragma once

#include "inputs.h"

// The row of blocks that starts at `place`. order is [2, rows]: the row of each place, then the
// place of each row. It is the caller's memory and may hold anything, but each row gets one place.
METAL_FUNC int ordered_row(const device int* order, int rows, int place) {
  const device int* places = order + rows;
  const int tile = order[place];
  if (tile >= 0 && tile < rows && places[tile] == place) { return tile; }
  // The entries disagree, and as many rows as places are left. The chain that starts at this place
  // and alternates between rows and their places ends at a row that no other place gets.
  int row = place;
  while (places[row] >= 0 && places[row] < rows && order[places[row]] == row) { row = places[row]; }
  return row;
}

// A column of the grid is a head or a slice of a head's columns. With BAND the tiles of a column
// see different numbers of keys. Threadgroups then start row by row, so that the last tiles to run
// see equally many keys.
struct GridPlace {
  int tile;
  int column;
  int batch;

  // With FLEX_ORDER, threadgroups start in the order of the rows of blocks, and heads and batches
  // that share a row's list start together. Blocks have LIST_BLOCK rows, a multiple of a tile's
  // BLOCK rows, and a head has COLUMNS columns.
  template <int LIST_BLOCK, int BLOCK, int COLUMNS>
  METAL_FUNC void reset(thread const FlashInputs& inputs, constant FlashParams& problem,
                        uint3 position, uint3 grid) thread {
    if (!FLEX_ORDER) {
      const uint place = position.y * grid.x + position.x;
      tile = BAND ? place / grid.y : position.x;
      column = BAND ? place % grid.y : position.y;
      batch = position.z;
      return;
    }
    constexpr int TILES = FLEX_ORDER ? LIST_BLOCK / BLOCK : 1;
    constant FlexParams& params = problem.flex;
    const int rows = grid.x / TILES;
    const int heads = grid.y / COLUMNS / params.order_heads;
    const int batches = grid.z / params.order_batches;
    const uint members = heads * batches * TILES * COLUMNS;
    const uint number = (position.z * grid.y + position.y) * grid.x + position.x;
    const int all_rows = params.order_batches * params.order_heads * rows;
    const int row = ordered_row(inputs.block_order, all_rows, number / members);
    const int member = number % members;
    const int sharer = member / COLUMNS / TILES;
    const int head = row / rows % params.order_heads + sharer % heads;
    tile = row % rows * TILES + member / COLUMNS % TILES;
    column = head * COLUMNS + member % COLUMNS;
    batch = row / rows / params.order_heads + sharer / heads;
  }
};

// A tile of BLOCK queries of one head, and one of HEAD_SLICES slices of its result's columns.
template <int BLOCK, int HEAD_SLICES>
struct QueryTilePlace {
  int batch;
  int head;
  int kv_head;
  int slice;
  int first_query;
  int number;  // of the threadgroup among those of its head and slice

  METAL_FUNC void reset(thread const FlashInputs& inputs, constant FlashParams& params,
                        uint3 position, uint3 grid) thread {
    GridPlace place;
    place.reset<FLEX_Q_BLOCK, BLOCK, HEAD_SLICES>(inputs, params, position, grid);
    batch = place.batch;
    head = place.column / HEAD_SLICES;
    kv_head = head / params.queries_per_kv;
    slice = place.column % HEAD_SLICES;
    number = place.tile;
    // Later queries may see more keys, and the tiles with the most keys start first.
    first_query = (BAND ? int(grid.x) - 1 - place.tile : place.tile) * BLOCK;
  }
};
