// Where the rows of one (sequence, head) of a result go.
#pragma once

#include "params.h"
#include "tile.h"

// Rows of COLUMNS columns, of which a threadgroup owns a slice of SLICE. GRID_SLICES: of the grid,
// which may be more than these rows have.
template <typename T, int COLUMNS, int SLICE, int GRID_SLICES = (COLUMNS + SLICE - 1) / SLICE>
struct Output {
  device T* rows;  // at the slice's first column
  int64_t row_stride;
  int columns;  // of the slice that exist

  METAL_FUNC void reset(device T* tensor, constant RowStrides& strides, int batch, int head,
                        int start, int slice) thread {
    rows =
        tensor + batch * strides.batch + head * strides.head + start * strides.row + slice * SLICE;
    row_stride = strides.row;
    columns = clamp(COLUMNS - slice * SLICE, 0, SLICE);
  }

  // Columns `column` and `column + 1` of a row.
  METAL_FUNC void store(int row, int column, Fragment<float> values) const thread {
    device T* destination = rows + row * row_stride + column;
    if (COLUMNS % 2 == 0) {
      if (COLUMNS == GRID_SLICES * SLICE || column < columns) {
        *reinterpret_cast<device Fragment<T>*>(destination) = Fragment<T>(T(values.x), T(values.y));
      }
    } else {
      if (column < columns) {
        destination[0] = T(values.x);
      }
      if (column + 1 < columns) {
        destination[1] = T(values.y);
      }
    }
  }

  // Rows `first`, `first + step`, ... before `end`, alike.
  METAL_FUNC void fill(float value, int first, int end, int step) const thread {
    for (int row = first; row < end; row += step) {
      for (int column = 0; column < columns; column++) {
        rows[row * row_stride + column] = T(value);
      }
    }
  }
};
