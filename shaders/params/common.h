// Fields and constants that several families share. The headers of this folder are the whole
// contract between host and shader. csrc/ includes them too, so structs hold plain fixed-width
// fields only, widest first. Enums are the [[buffer(i)]] slots of a kernel.
#pragma once

#ifdef __METAL_VERSION__
using namespace metal;
#else
#include <cstdint>
#endif

// Metal's limit for one threadgroup on every Apple GPU.
#define THREADGROUP_MEMORY_BYTES 32768
// Bytes that an array takes of it: the next one begins at a multiple of 16.
#define ARRAY_BYTES(BYTES) (((BYTES) + 15) / 16 * 16)

// Dot products of more columns are summed in two chains, which halves their rounding error.
#define CHAIN_COLUMNS 128

// Leading dimension of a threadgroup tile that is `columns` (a multiple of 8) wide: an odd multiple
// of 8, so that the 32 lanes of a fragment load touch 32 different banks.
constexpr int padded(int columns) { return columns | 8; }

// SIMD groups that share rows: the largest of 1, 2, 4 that divides the query fragments. The other
// SIMD groups take other rows.
constexpr int query_parts(int query_fragments, int simdgroups) {
  return query_fragments % simdgroups == 0 ? simdgroups : query_fragments % 2 == 0 ? 2 : 1;
}

// The place of a piece of a launch in its grid (GRID_PIECE): x, y and z.
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

// Element strides of a mask or bias that broadcasts to (batch, head, query, key): 0 where it does.
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

// Dimensions other than the softmax's axis, at most: each has two positions or more, and the rows
// are counted in 31 bits.
#define MAX_ROW_DIMS 31

// The first element of each row: sizes and element strides of the dimensions that count rows,
// innermost first.
struct RowDims {
  int64_t strides[MAX_ROW_DIMS];
  uint32_t sizes[MAX_ROW_DIMS];
  int32_t count;
};
