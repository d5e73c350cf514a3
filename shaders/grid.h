// Which tile of rows a threadgroup has.
#pragma once

#include "features.h"
#include "params.h"

#if FLEX_ORDER
// The row of blocks that starts at `place`. order, [2, rows]: each place's row, and each row's
// place. It comes from the caller's memory: whatever it holds, every row has one place.
METAL_FUNC int ordered_row(const device int* order, int rows, int place) {
  const device int* places = order + rows;
  const int given = order[place];
  if (given >= 0 && given < rows && places[given] == place) {
    return given;
  }
  // As many rows as places are left over. The chain of rows and their places ends at one of them.
  int row = place;
  while (places[row] >= 0 && places[row] < rows && order[places[row]] == row) {
    row = places[row];
  }
  return row;
}
#endif

// Columns of the grid are heads, or slices of heads. With BAND tiles differ in length: threadgroups
// start row by row, so all columns' tiles begin in their order, and the last to run are alike.
struct GridPlace {
  int tile;
  int column;
  int batch;

  METAL_FUNC void reset(uint3 position, uint3 grid) thread {
#if BAND
    const uint place = position.y * grid.x + position.x;
    tile = place / grid.y;
    column = place % grid.y;
#else
    tile = position.x;
    column = position.y;
#endif
    batch = position.z;
  }

#if FLEX_ORDER
  // Threadgroups start in the order of rows of blocks, each with TILES tiles of a head, which has
  // COLUMNS. Those of all heads and batches that share a row's list start together.
  template <int TILES, int COLUMNS>
  METAL_FUNC void reset_in_order(const device int* order, constant FlexParams& params,
                                 uint3 position, uint3 grid) thread {
    const int rows = grid.x / TILES;
    const int heads = grid.y / COLUMNS / params.order_heads;
    const int batches = grid.z / params.order_batches;
    const uint same = heads * batches * TILES * COLUMNS;
    const uint number = (position.z * grid.y + position.y) * grid.x + position.x;
    const int row =
        ordered_row(order, params.order_batches * params.order_heads * rows, number / same);
    const int member = number % same;
    const int sharer = member / COLUMNS / TILES;
    const int head = row / rows % params.order_heads + sharer % heads;
    tile = row % rows * TILES + member / COLUMNS % TILES;
    column = head * COLUMNS + member % COLUMNS;
    batch = row / rows / params.order_heads + sharer / heads;
  }
#endif
};
