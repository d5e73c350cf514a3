// Which tile of rows a threadgroup has.
#pragma once

#include "params.h"

// Columns of the grid are heads, or slices of heads. With BAND tiles differ in length: threadgroups
// start row by row, so all columns' tiles begin in their order, and the last to run are alike.
struct GridPlace {
  int tile;
  int column;

  METAL_FUNC void reset(uint3 position, uint3 grid) thread {
#if BAND
    const uint place = position.y * grid.x + position.x;
    tile = place / grid.y;
    column = place % grid.y;
#else
    tile = position.x;
    column = position.y;
#endif
  }
};
