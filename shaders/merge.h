// Shared by the kernels that merge results of attention: which row a thread has, and the vectors of
// columns that it moves.
#pragma once

#include "params/merge.h"
#include "tile.h"

// Where a row is in its tensors.
struct MergeRow {
  int64_t batch;
  int64_t head;
  int64_t row;

  METAL_FUNC void reset(constant MergeShape& shape, uint index) thread {
    const uint length = shape.length;
    const uint heads = shape.heads;
    row = index % length;
    head = index / length % heads;
    batch = index / length / heads;
  }

  METAL_FUNC int64_t offset(constant RowStrides& strides) const thread {
    return batch * strides.batch + head * strides.head + row * strides.row;
  }
};

// 16 bytes of a row, or one element of rows that lie otherwise. Bits, so that copies are exact.
using Chunk = conditional_t<WIDE_LOADS, uint4, ELEMENT>;
using SplitColumns = conditional_t<WIDE_LOADS, float4, float>;
constant constexpr int CHUNK_COLUMNS = int(sizeof(Chunk) / sizeof(ELEMENT));
constant constexpr int SPLIT_COLUMNS = int(sizeof(SplitColumns) / sizeof(float));

METAL_FUNC Chunk load_columns(const device ELEMENT* first) {
  return *reinterpret_cast<const device Chunk*>(first);
}

METAL_FUNC SplitColumns load_split(const device float* first) {
  return *reinterpret_cast<const device SplitColumns*>(first);
}

METAL_FUNC void store_columns(device ELEMENT* first, float value) { *first = ELEMENT(value); }

METAL_FUNC void store_columns(device ELEMENT* first, float4 values) {
  *reinterpret_cast<device vec<ELEMENT, 4>*>(first) =
      vec<ELEMENT, 4>(ELEMENT(values.x), ELEMENT(values.y), ELEMENT(values.z), ELEMENT(values.w));
}

// The sum over lanes that have the same columns of different splits.
METAL_FUNC float sum_splits(float value) {
  UNROLL
  for (ushort step = MERGE_SPLITS_COLUMN_LANES; step < SIMD_LANES; step *= 2) {
    value += simd_shuffle_xor(value, step);
  }
  return value;
}

METAL_FUNC float4 sum_splits(float4 values) {
  return float4(sum_splits(values.x), sum_splits(values.y), sum_splits(values.z),
                sum_splits(values.w));
}
