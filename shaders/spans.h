// How a SIMD group reads rows from device memory into fragments without staging.
//
// A span is 32 columns of 8 rows. Each lane loads 8 neighbouring columns of one row, its unit, and
// four 8x8 fragments take two columns each from every unit:
//
//   columns of the span   0 1 2 3 4 5 6 7   8 9 ..  15   16 ..  23   24 ..  31
//   unit                  0                 1             2           3
//   fragment              0 0 1 1 2 2 3 3   0 0 ..  3     0 ..  3     0 ..  3
//
// So column 2u + e of fragment f is column 8u + 2f + e of the span. If both factors have this
// order, sums over columns are the same. Results also have this order, and are stored by units.
#pragma once

#include "operand.h"
#include "quantised.h"
#include "tile.h"

constant constexpr int UNIT_COLUMNS = 8;

// Spans that hold `columns` columns.
constexpr int spans(int columns) { return (columns + SPAN_COLUMNS - 1) / SPAN_COLUMNS; }

// The first column of a lane's unit in its span. column: the lane's first column in a fragment.
METAL_FUNC int first_unit_column(ushort column) { return column / LANE_COLUMNS * UNIT_COLUMNS; }

// The column of a span that is row `row` of fragment f in the transposed span.
METAL_FUNC ushort span_column(ushort row, ushort f) {
  return row / 2 * UNIT_COLUMNS + 2 * f + row % 2;
}

// A lane's unit of a row: its elements of the span's fragments.
template <typename T>
struct Unit {
  Fragment<T> fragments[SPAN_FRAGMENTS];

  METAL_FUNC void fill(T value) thread {
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) { fragments[j] = Fragment<T>(value, value); }
  }

  // In threadgroup memory, the pairs of the 32 lanes are neighbours.
  METAL_FUNC void store(threadgroup Fragment<T>* pairs) const thread {
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) { pairs[j * SIMD_LANES] = fragments[j]; }
  }

  METAL_FUNC void load(const threadgroup Fragment<T>* pairs) thread {
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) { fragments[j] = pairs[j * SIMD_LANES]; }
  }

  template <int FORMAT>
  METAL_FUNC void expand_codes(uint2 codes) thread {
    T values[UNIT_COLUMNS];
    expand<FORMAT, T, UNIT_COLUMNS>(values, codes, values);
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) {
      fragments[j] = Fragment<T>(values[2 * j], values[2 * j + 1]);
    }
  }

  // Loads from `column` on. Columns from COLUMNS on are 0. If the row does not exist, all are 0.
  // WHOLE: no unit begins at COLUMNS or later.
  template <int COLUMNS, bool WHOLE = COLUMNS % SPAN_COLUMNS == 0, typename Source>
  METAL_FUNC void load(thread const Source& source, thread const typename Source::Place& place,
                       int column, bool exists) thread {
    constexpr int CHUNK = chunk_elements<T>();
    constexpr int PAIRS = CHUNK / LANE_COLUMNS;
    UNROLL
    for (short i = 0; i < UNIT_COLUMNS / CHUNK; i++) {
      uint4 chunk = uint4(0);
      if (WHOLE || column + i * CHUNK < COLUMNS) {
        chunk = source.chunk(place, column + i * CHUNK);
      }
      UNROLL
      for (short j = 0; j < PAIRS; j++) {
        fragments[i * PAIRS + j] = chunk_pair<T>(exists ? chunk : uint4(0), j);
      }
    }
  }
};
