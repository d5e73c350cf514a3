// Structs and constants that several families share. Host and shader share the headers of this
// folder and nothing else. Structs hold plain fixed-width fields, widest first. Enums are the
// [[buffer(i)]] slots of a kernel.
#pragma once

#ifdef __METAL_VERSION__
using namespace metal;
#else
#include <cstdint>
#endif

// Metal's limit for one threadgroup on every Apple GPU.
#define THREADGROUP_MEMORY_BYTES 32768
// Its bytes that an array takes: the next array begins at a multiple of 16.
#define ARRAY_BYTES(BYTES) (((BYTES) + 15) / 16 * 16)

// A dot product of more columns is summed in chains of this many, which reduces its rounding error.
#define CHAIN_COLUMNS 128

// The leading dimension of a threadgroup tile of `columns` columns, a multiple of 8. It is an odd
// multiple of 8, so that the 32 lanes of a fragment load access 32 different banks.
constexpr int padded(int columns) { return columns | 8; }

// SIMD groups that share rows: the largest of 1, 2, 4 that divides the query fragments. The other
// SIMD groups take other rows.
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

// Each dimension has a size of 2 or more, and rows are numbered in 31 bits.
#define MAX_ROW_DIMS 31

// Sizes and element strides of the dimensions that number rows, innermost first.
struct RowDims {
  int64_t strides[MAX_ROW_DIMS];
  uint32_t sizes[MAX_ROW_DIMS];
  int32_t count;
};
