// The rows of one (sequence, head) of a result.
#pragma once

#include "operand.h"

// A threadgroup writes a slice of SLICE columns. A row has COLUMNS columns. GRID_SLICES: the number
// of slices in the grid, which may be more than these rows need.
template <typename T, int COLUMNS, int SLICE, int GRID_SLICES = (COLUMNS + SLICE - 1) / SLICE>
struct Output {
  device T* tensor;
  Offset first;  // element of row 0 in the slice
  Offset row_stride;
  int columns;  // that exist in the slice

  METAL_FUNC void reset(device T* own_tensor, constant RowStrides& strides, int batch, int head,
                        int start, int slice) thread {
    tensor = own_tensor;
    first = row_offset(strides, batch, head, start) + slice * SLICE;
    row_stride = Offset(strides.row);
    columns = clamp(COLUMNS - slice * SLICE, 0, SLICE);
  }

  // Columns `column` and `column + 1` of a row.
  METAL_FUNC void store(int row, int column, Fragment<float> values) const thread {
    device T* destination = tensor + (first + Offset(row) * row_stride) + column;
    if (COLUMNS % 2 == 0) {
      if (COLUMNS == GRID_SLICES * SLICE || column < columns) {
        *reinterpret_cast<device Fragment<T>*>(destination) = Fragment<T>(T(values.x), T(values.y));
      }
    } else {
      if (column < columns) { destination[0] = T(values.x); }
      if (column + 1 < columns) { destination[1] = T(values.y); }
    }
  }

  // Sets all columns of rows `begin`, `begin + step`, ... before `end` to `value`.
  METAL_FUNC void fill(float value, int begin, int end, int step) const thread {
    for (int row = begin; row < end; row += step) {
      for (int column = 0; column < columns; column++) {
        tensor[first + Offset(row) * row_stride + column] = T(value);
      }
    }
  }
};
