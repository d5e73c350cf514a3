// Rows of a tensor of any rank and strides, and the share of a row that each thread has.
//
// ROW_SIMDGROUPS SIMD groups have a row, and a threadgroup THREADGROUP_ROWS rows. They walk along
// the row ROW_BLOCK values at a time, ITEMS of them a thread: neighbours of 16 bytes in all where
// rows lie so (WIDE_LOADS), else ROW_THREADS apart, so that neighbouring threads have neighbouring
// values.
#pragma once

#include "params/common.h"
#include "row_dims.h"
#include "tile.h"

constant constexpr int ITEMS = chunk_elements<ELEMENT>();
constant constexpr int ROW_THREADS = ROW_SIMDGROUPS * SIMD_LANES;
constant constexpr int ROW_BLOCK = ROW_THREADS * ITEMS;
constant constexpr int THREADS = THREADGROUP_ROWS * ROW_THREADS;

static_assert(ROW_SIMDGROUPS == 1 || THREADGROUP_ROWS == 1, "a barrier is for one row");

// The row of a thread. May be past the last one, for a whole SIMD group at a time.
METAL_FUNC uint row_of(uint3 threadgroup_position, uint3 threadgroups, ushort thread_index) {
  const uint block = threadgroup_position.y * threadgroups.x + threadgroup_position.x;
  return block * THREADGROUP_ROWS + thread_index / ROW_THREADS;
}

// The position in the row of a thread's item of the block that starts at `block`.
METAL_FUNC uint item_position(uint block, ushort row_thread, short item) {
  return WIDE_LOADS ? block + uint(row_thread) * ITEMS + item
                    : block + uint(item) * ROW_THREADS + row_thread;
}

// Whether the thread's items are one chunk, inside the row and none before `begin`.
METAL_FUNC bool is_whole_chunk(uint block, ushort row_thread, uint begin, uint length) {
  const uint first = item_position(block, row_thread, 0);
  return WIDE_LOADS && first >= begin && first + ITEMS <= length;
}

// The thread's items of a block in float32; -inf, which has no weight, past the end of the row.
METAL_FUNC void load_items(const device ELEMENT* row, int64_t stride, uint length, uint block,
                           ushort row_thread, thread float* items) {
  if (is_whole_chunk(block, row_thread, 0, length)) {
    const uint4 chunk =
        *reinterpret_cast<const device uint4*>(row + item_position(block, row_thread, 0));
    UNROLL
    for (short i = 0; i < ITEMS; i++) {
      items[i] = float(reinterpret_cast<thread const ELEMENT*>(&chunk)[i]);
    }
    return;
  }
  UNROLL
  for (short i = 0; i < ITEMS; i++) {
    const uint position = item_position(block, row_thread, i);
    items[i] = position < length ? float(row[position * stride]) : -INFINITY;
  }
}

// Stores those of them that are in begin..length-1.
METAL_FUNC void store_items(device ELEMENT* row, int64_t stride, uint begin, uint length,
                            uint block, ushort row_thread, thread const float* items) {
  if (is_whole_chunk(block, row_thread, begin, length)) {
    uint4 chunk;
    UNROLL
    for (short i = 0; i < ITEMS; i++) {
      reinterpret_cast<thread ELEMENT*>(&chunk)[i] = ELEMENT(items[i]);
    }
    *reinterpret_cast<device uint4*>(row + item_position(block, row_thread, 0)) = chunk;
    return;
  }
  UNROLL
  for (short i = 0; i < ITEMS; i++) {
    const uint position = item_position(block, row_thread, i);
    if (position >= begin && position < length) {
      row[position * stride] = ELEMENT(items[i]);
    }
  }
}
