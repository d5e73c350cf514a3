// Rows of one (sequence, head) of q, k, v or a gradient, and tiles that are read from them.
#pragma once

#include "rotary.h"
#include "tile.h"

METAL_FUNC Offset row_offset(constant RowStrides& strides, Offset batch, Offset head, Offset row) {
  return batch * Offset(strides.batch) + head * Offset(strides.head) + row * Offset(strides.row);
}

// The offset and the index of a row.
struct RowPlace {
  Offset row;
  int position;
};

// Rows of COLUMNS columns at a fixed stride; with ROTATED they are rotated as they are read. Call
// `find` for a row in uniform control flow, then `chunk` for parts of it.
template <typename T, int COLUMNS, bool ROTATED = false>
struct Operand {
  using Place = RowPlace;
  const device T* tensor;
  Offset first;
  Offset row_stride;
  RotaryTables rotary;  // ROTATED

  METAL_FUNC void reset(const device T* own_tensor, constant RowStrides& strides, int batch,
                        int head, int first_row) thread {
    tensor = own_tensor;
    first = row_offset(strides, batch, head, first_row);
    row_stride = Offset(strides.row);
  }

  METAL_FUNC Offset offset(int row) const thread { return first + Offset(row) * row_stride; }

  // The interface of CacheOperand, for rows that are neither in pages nor quantised.
  METAL_FUNC uint2 codes(thread const Place&, int) const thread { return uint2(0); }
  METAL_FUNC float span_scale(thread const Place&, int) const thread { return 1.0f; }
  METAL_FUNC int page_among(int, int) const thread { return 0; }
  METAL_FUNC Place find_in(int, int row) const thread { return find(row); }
  METAL_FUNC void reset_pages(const device int*, int, int) const thread {}
  template <typename Scale>
  METAL_FUNC void reset_scale(const device Scale*, constant RowStrides&, int, int, int,
                              int) const thread {}
  METAL_FUNC void move_to(int, int, ushort) const thread {}
  template <typename Other>
  METAL_FUNC void use_pages_of(thread const Other&) const thread {}

  // An element of a row; 0 for columns from COLUMNS on.
  METAL_FUNC T element(int row, int column) const thread {
    const bool exists = COLUMNS % FRAGMENT == 0 || column < COLUMNS;
    if (ROTATED) { return exists ? rotary.rotated(tensor, offset(row), row, column) : T(0); }
    return exists ? tensor[offset(row) + column] : T(0);
  }

  // Columns c = `first` + `lane_column` and c + 1; both terms are even. OWN: the number of columns
  // of the tile. If it is less than a row, lane_column includes the tile's first column.
  template <int OWN>
  METAL_FUNC Fragment<T> pair(int row, int first, int lane_column) const thread {
    const int column = first + lane_column;
    if (ROW_PAIRS && !ROTATED) {
      return COLUMNS % FRAGMENT == 0 || column < COLUMNS
                 ? *reinterpret_cast<const device Fragment<T>*>(tensor + (offset(row) + column))
                 : Fragment<T>(T(0), T(0));
    }
    const bool interleaved = ROTATED && ROTARY_INTERLEAVED && ROTARY_FIRST % 2 == 0;
    const bool whole_row = ROTARY_DIM == COLUMNS && COLUMNS % FRAGMENT == 0;
    const bool halves = ROTATED && !ROTARY_INTERLEAVED && OWN >= COLUMNS &&
                        ROTARY_FIRST % FRAGMENT == 0 && ROTARY_PAIRS % FRAGMENT == 0;
    if ((interleaved && (whole_row || is_rotated(column))) || (halves && is_rotated(first))) {
      return rotary.rotated_pair(tensor, offset(row), row, first, lane_column);
    }
    return Fragment<T>(element(row, column), element(row, column + 1));
  }

  METAL_FUNC Place find(int row) const thread { return {offset(row), row}; }

  // 16 bytes from `column` on; 0 for columns from COLUMNS on.
  METAL_FUNC uint4 chunk(thread const Place& place, int column) const thread {
    if (ROTATED) {
      return rotary.rotated_chunk<COLUMNS>(tensor, place.row, place.position, column);
    }
    return load_chunk<COLUMNS>(tensor, place.row, column);
  }
};

// The lane's row in row fragment i. Rows after last_row become last_row and are not stored.
METAL_FUNC int existing_row(int row, short i, int last_row) {
  return min(row + i * FRAGMENT, last_row);
}

// A SIMD group's rows of an operand, [ROWS * 8, FRAGMENTS * 8], as the left factor of products.
// They are in registers if HELD, and otherwise read again for each product.
template <typename T, typename Source, int ROWS, int FRAGMENTS, bool HELD>
struct OperandTile {
  using Element = T;
  Source source;
  int positions[ROWS];  // of the lane's rows
  int lane_column;
  RegisterTile<T, ROWS, HELD ? FRAGMENTS : 1> held;

  // The interface of KeptOperandTile.
  METAL_FUNC void keep_in(threadgroup uint4*, ushort, ushort) const thread {}

  METAL_FUNC Fragment<T> read(short i, short d) const thread {
    return source.template pair<FRAGMENTS * FRAGMENT>(positions[i], d * FRAGMENT, lane_column);
  }

  METAL_FUNC void load(Source rows, int row, int last_row, int column) thread {
    source = rows;
    lane_column = column;
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      positions[i] = existing_row(row, i, last_row);
      if (HELD) {
        UNROLL
        for (short d = 0; d < FRAGMENTS; d++) { held.fragments[i][HELD ? d : 0] = read(i, d); }
      }
    }
  }

  METAL_FUNC Fragment<T> fragment_at(short i, short d) const thread {
    return HELD ? held.fragments[i][HELD ? d : 0] : read(i, d);
  }
};

// The rows of OperandTile in threadgroup memory, where each lane reads only its own elements.
template <typename T, typename Source, int ROWS, int FRAGMENTS>
struct KeptOperandTile {
  using Element = T;
  static constant constexpr int CHUNK_FRAGMENTS = chunk_elements<T>() / LANE_COLUMNS;
  static constant constexpr int CHUNKS = (FRAGMENTS + CHUNK_FRAGMENTS - 1) / CHUNK_FRAGMENTS;
  static constant constexpr int SIZE = ROWS * CHUNKS * SIMD_LANES;
  threadgroup uint4* chunks;  // [ROWS, CHUNKS, SIMD_LANES], from the lane's first chunk on

  // memory: SIZE chunks for each SIMD group.
  METAL_FUNC void keep_in(threadgroup uint4* memory, ushort simdgroup, ushort lane) thread {
    chunks = memory + simdgroup * SIZE + lane;
  }

  METAL_FUNC void load(Source rows, int row, int last_row, int column) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      const int position = existing_row(row, i, last_row);
      UNROLL
      for (short n = 0; n < CHUNKS; n++) {
        uint4 chunk = uint4(0);
        UNROLL
        for (short f = 0; f < min(CHUNK_FRAGMENTS, FRAGMENTS - n * CHUNK_FRAGMENTS); f++) {
          const int first = (n * CHUNK_FRAGMENTS + f) * FRAGMENT;
          set_chunk_pair<T>(chunk, f,
                            rows.template pair<FRAGMENTS * FRAGMENT>(position, first, column));
        }
        chunks[(i * CHUNKS + n) * SIMD_LANES] = chunk;
      }
    }
  }

  METAL_FUNC Fragment<T> fragment_at(short i, short d) const thread {
    const uint4 chunk = chunks[(i * CHUNKS + d / CHUNK_FRAGMENTS) * SIMD_LANES];
    return chunk_pair<T>(chunk, d % CHUNK_FRAGMENTS);
  }
};

// Stages rows [first, first + BLOCK) as pairs: tile[row / 2][column] holds the elements
// (row, column) and (row + 1, column), so that a lane loads both columns of a transposed fragment
// at once. If ZEROED, rows outside [begin, end) are zero. Otherwise the last row is repeated.
template <typename T, int BLOCK, int COLUMNS, int THREADS, bool ZEROED, typename Source>
METAL_FUNC void stage_pairs(threadgroup uint4* tile, thread const Source& source, int first,
                            int begin, int end, int thread_index) {
  constexpr int CHUNK = chunk_elements<T>();
  constexpr int CHUNKS = COLUMNS / CHUNK;                   // of one row
  constexpr int TILE_CHUNKS = padded(COLUMNS) * 2 / CHUNK;  // of one row of pairs
  constexpr int UNITS = BLOCK / 2 * CHUNKS;
  UNROLL
  for (int i = 0; i < (UNITS + THREADS - 1) / THREADS; i++) {
    const int unit = thread_index + i * THREADS;
    const bool owned = UNITS % THREADS == 0 || unit < UNITS;
    const int pair = owned ? unit / CHUNKS : 0;
    const int row = first + 2 * pair;
    // All lanes call `find`, because it may shuffle.
    const typename Source::Place even_place = source.find(min(row, end - 1));
    const typename Source::Place odd_place = source.find(min(row + 1, end - 1));
    if (owned) {
      const int chunk = unit % CHUNKS;
      uint4 even_row = source.chunk(even_place, chunk * CHUNK);
      uint4 odd_row = source.chunk(odd_place, chunk * CHUNK);
      if (ZEROED) {
        even_row = row >= begin && row < end ? even_row : uint4(0);
        odd_row = row + 1 >= begin && row + 1 < end ? odd_row : uint4(0);
      }
      uint4 low;
      uint4 high;
      zip_pairs<T>(even_row, odd_row, low, high);
      threadgroup uint4* destination = tile + pair * TILE_CHUNKS + 2 * chunk;
      destination[0] = low;
      destination[1] = high;
    }
  }
}

// Stages columns [first_column, first_column + COLUMNS) of rows [first, first + BLOCK), which have
// ROW_COLUMNS columns. Rows outside [begin, end) are zero: their weights are zero, and 0 * inf or
// 0 * NaN would be NaN. GRID_SLICES: as in Output.
template <typename T, int BLOCK, int COLUMNS, int THREADS, int ROW_COLUMNS,
          int GRID_SLICES = (ROW_COLUMNS + COLUMNS - 1) / COLUMNS, typename Source>
METAL_FUNC void stage_rows(threadgroup uint4* tile, thread const Source& source, int first,
                           int begin, int end, int first_column, int thread_index) {
  constexpr int CHUNK = chunk_elements<T>();
  constexpr int CHUNKS = COLUMNS / CHUNK;
  constexpr int TILE_CHUNKS = padded(COLUMNS) / CHUNK;
  constexpr int UNITS = BLOCK * CHUNKS;
  UNROLL
  for (int i = 0; i < (UNITS + THREADS - 1) / THREADS; i++) {
    const int unit = thread_index + i * THREADS;
    const bool owned = UNITS % THREADS == 0 || unit < UNITS;
    const int tile_row = owned ? unit / CHUNKS : 0;
    const int row = first + tile_row;
    const typename Source::Place place = source.find(min(row, end - 1));
    if (owned) {
      const int chunk = unit % CHUNKS;
      const int column = first_column + chunk * CHUNK;
      uint4 values = uint4(0);
      // The last slice may pass the end of a row by more than a fragment.
      if (ROW_COLUMNS == GRID_SLICES * COLUMNS || column < ROW_COLUMNS) {
        values = source.chunk(place, column);
      }
      tile[tile_row * TILE_CHUNKS + chunk] = row >= begin && row < end ? values : uint4(0);
    }
  }
}

// The lane's pointer into a tile of pairs, for transposed_fragment.
template <typename T, int COLUMNS>
METAL_FUNC const threadgroup Fragment<T>* lane_of_pairs(const threadgroup uint4* tile, ushort row,
                                                        ushort column) {
  return reinterpret_cast<const threadgroup Fragment<T>*>(tile) + column / 2 * padded(COLUMNS) +
         row;
}

// Rows [8 d, 8 d + 8) and columns [8 j, 8 j + 8) of the transposed tile.
template <typename T, int COLUMNS>
METAL_FUNC Fragment<T> transposed_fragment(const threadgroup Fragment<T>* lane, short d, short j) {
  return lane[j * FRAGMENT / 2 * padded(COLUMNS) + d * FRAGMENT];
}

template <typename T, int COLUMNS>
METAL_FUNC const threadgroup Fragment<T>* lane_of_rows(const threadgroup uint4* tile, ushort row,
                                                       ushort column) {
  return reinterpret_cast<const threadgroup Fragment<T>*>(tile) +
         (row * padded(COLUMNS) + column) / LANE_COLUMNS;
}

// Rows [8 j, 8 j + 8) and columns [8 d, 8 d + 8) of the tile.
template <typename T, int COLUMNS>
METAL_FUNC Fragment<T> row_fragment(const threadgroup Fragment<T>* lane, short j, short d) {
  return lane[(j * FRAGMENT * padded(COLUMNS) + d * FRAGMENT) / LANE_COLUMNS];
}

// Reads a slice of columns in a tile of pairs as rows. A lane loads a pair of rows and uses its own
// row. WHOLE: all columns of the slice exist.
template <typename T, int COLUMNS, bool WHOLE>
struct PairedRows {
  const threadgroup vec<T, 4>* lane;
  bool odd;
  short last;  // the last fragment of the slice that exists
};

// first: the slice's first column, a multiple of 8.
template <typename T, int COLUMNS, bool WHOLE>
METAL_FUNC PairedRows<T, COLUMNS, WHOLE> lane_of_paired_rows(const threadgroup uint4* tile,
                                                             ushort row, ushort column, int first) {
  return {reinterpret_cast<const threadgroup vec<T, 4>*>(tile) +
              (row / 2 * padded(COLUMNS) + first + column) / LANE_COLUMNS,
          row % 2 != 0, short((COLUMNS - first) / FRAGMENT - 1)};
}

// Fragment indices after rows.last load that fragment again; their results are not stored.
template <typename T, int SLICE, int COLUMNS, bool WHOLE>
METAL_FUNC Fragment<T> row_fragment(PairedRows<T, COLUMNS, WHOLE> rows, short j, short d) {
  const short existing = WHOLE ? d : min(d, rows.last);
  const vec<T, 4> pairs =
      rows.lane[(j * FRAGMENT / 2 * padded(COLUMNS) + existing * FRAGMENT) / LANE_COLUMNS];
  return rows.odd ? Fragment<T>(pairs.y, pairs.w) : Fragment<T>(pairs.x, pairs.z);
}
