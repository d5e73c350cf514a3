// Structs and constants that several families share. Host and shaders share only this folder's
// headers. Structs hold plain fixed-width fields, widest first. Enums hold [[buffer(i)]] slots.
#pragma once

#ifdef __METAL_VERSION__
using namespace metal;
#else
#include <cstdint>
#endif

// Metal's limit for one threadgroup on every Apple GPU.
#define THREADGROUP_MEMORY_BYTES 32768
// The bytes that an array takes there: the next array begins at a multiple of 16 bytes.
#define ARRAY_BYTES(BYTES) (((BYTES) + 15) / 16 * 16)

// Dot products over more columns are summed in chains of so many columns, for smaller errors.
#define CHAIN_COLUMNS 128

// The leading dimension of a threadgroup tile of `columns` columns, a multiple of 8. It is an odd
// multiple of 8, so that the 32 lanes of a fragment load access 32 different banks.
constexpr int padded(int columns) { return columns | 8; }

// The number of parts into which `simdgroups` SIMD groups (1, 2 or 4) divide the queries of a tile:
// as many as divide the query fragments evenly. SIMD groups with the same queries divide the rows.
constexpr int query_parts(int query_fragments, int simdgroups) {
  return query_fragments % simdgroups == 0 ? simdgroups : query_fragments % 2 == 0 ? 2 : 1;
}

// A box of a launch's grid (GRID_PIECE): x, y and z.
struct GridPiece {
  uint32_t first[3];
  uint32_t threadgroups[3];  // of the whole grid
};

// Element strides of one (batch, head, row, column) operand; the last dimension has stride 1.
struct RowStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Element strides of a mask or bias of shape (batch, head, query, key); 0 where it broadcasts.
struct MaskStrides {
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

// Element strides of a (batch, row, column) table; the last dimension has stride 1.
struct TableStrides {
  int64_t batch;
  int64_t row;
};

// The maximum number of dimensions: each has a size of 2 or more, and row numbers have 31 bits.
#define MAX_ROW_DIMS 31

// Sizes and element strides of the dimensions that number rows, innermost first.
struct RowDims {
  int64_t strides[MAX_ROW_DIMS];
  uint32_t sizes[MAX_ROW_DIMS];
  int32_t count;
};
