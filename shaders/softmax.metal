// Softmax along one axis of a tensor, and the causal mask that may come before it.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3: one pass
// over the row for its maximum and sum, and a second pass that writes.
#include "params/softmax.h"
#include "row_dims.h"
#include "softmax.h"

// The host defines ELEMENT, ROW_SIMDGROUPS, THREADGROUP_ROWS and WIDE_LOADS.

// ROW_SIMDGROUPS SIMD groups share a row, and a threadgroup has THREADGROUP_ROWS rows. A row is
// read in blocks of ROW_BLOCK values, ITEMS for each thread. With WIDE_LOADS a thread's items are
// one aligned load of 16 bytes. Otherwise neighbouring threads read neighbouring values.
constant constexpr int ITEMS = chunk_elements<ELEMENT>();
constant constexpr int ROW_THREADS = ROW_SIMDGROUPS * SIMD_LANES;
constant constexpr int ROW_BLOCK = ROW_THREADS * ITEMS;
constant constexpr int THREADS = THREADGROUP_ROWS * ROW_THREADS;

static_assert(ROW_SIMDGROUPS == 1 || THREADGROUP_ROWS == 1, "a barrier synchronises one row");

// The row of a thread and of its SIMD group. It may be after the last row.
METAL_FUNC uint row_of(uint3 threadgroup_position, uint3 threadgroups, ushort thread_index) {
  const uint block = threadgroup_position.y * threadgroups.x + threadgroup_position.x;
  return block * THREADGROUP_ROWS + thread_index / ROW_THREADS;
}

// The position in the row of a thread's item of the block that starts at `block`.
METAL_FUNC uint item_position(uint block, ushort row_thread, short item) {
  return WIDE_LOADS ? block + uint(row_thread) * ITEMS + item
                    : block + uint(item) * ROW_THREADS + row_thread;
}

// True if the thread's items are one chunk whose positions are in [begin, length).
METAL_FUNC bool is_whole_chunk(uint block, ushort row_thread, uint begin, uint length) {
  const uint first = item_position(block, row_thread, 0);
  return WIDE_LOADS && first >= begin && first + ITEMS <= length;
}

// Loads the thread's items of a block. Items after the end of the row are -inf, whose weight is 0.
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

// Stores the items whose positions are in [begin, length).
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
    if (position >= begin && position < length) { row[position * stride] = ELEMENT(items[i]); }
  }
}

// Merges the normalisers of all SIMD groups of the row.
METAL_FUNC void merge_simdgroups(thread SoftmaxNormaliser& normaliser, threadgroup float* row_max,
                                 threadgroup float* row_sum, ushort simdgroup, ushort lane) {
  if (lane == 0) {
    row_max[simdgroup] = normaliser.row_max;
    row_sum[simdgroup] = normaliser.row_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  normaliser.reset();
  if (lane < ROW_SIMDGROUPS) {
    normaliser.row_max = row_max[lane];
    normaliser.row_sum = row_sum[lane];
  }
  normaliser.merge_lanes();
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void softmax(
    const device ELEMENT* x [[buffer(SOFTMAX_X)]], device ELEMENT* out [[buffer(SOFTMAX_OUT)]],
    constant SoftmaxParams& params [[buffer(SOFTMAX_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
#if ROW_SIMDGROUPS > 1
  threadgroup float simdgroup_max[ROW_SIMDGROUPS];
  threadgroup float simdgroup_sum[ROW_SIMDGROUPS];
#endif

  const uint row = row_of(threadgroup_position, threadgroups, thread_index);
  if (row >= params.rows) { return; }
  const ushort row_thread = thread_index % ROW_THREADS;
  const uint length = params.length;
  const device ELEMENT* x_row = x + row_offset(params.x_rows, row);
  device ELEMENT* out_row = out + row_offset(params.out_rows, row);

  float items[ITEMS];
  SoftmaxNormaliser normaliser;
  normaliser.reset();
  for (uint block = 0; block < length; block += ROW_BLOCK) {
    load_items(x_row, params.x_stride, length, block, row_thread, items);
    normaliser.update<ITEMS>(items);
  }
  normaliser.merge_lanes();
#if ROW_SIMDGROUPS > 1
  merge_simdgroups(normaliser, simdgroup_max, simdgroup_sum, simdgroup, lane);
#endif

  const float factor = normaliser.finalize();
  for (uint block = 0; block < length; block += ROW_BLOCK) {
    load_items(x_row, params.x_stride, length, block, row_thread, items);
    UNROLL
    for (short i = 0; i < ITEMS; i++) { items[i] = normaliser.weight(items[i]) * factor; }
    store_items(out_row, params.out_stride, 0, length, block, row_thread, items);
  }
}

// Writes -inf where key > query + q_offset.
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void apply_causal_mask(
    device ELEMENT* scores [[buffer(CAUSAL_MASK_SCORES)]],
    constant CausalMaskParams& params [[buffer(CAUSAL_MASK_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  const uint row = row_of(threadgroup_position, threadgroups, thread_index);
  if (row >= params.rows) { return; }
  const int64_t query = row % params.q_length;
  const int64_t first_masked = query + params.q_offset + 1;
  if (first_masked >= params.kv_length) { return; }
  const uint begin = first_masked < 0 ? 0 : uint(first_masked);
  const ushort row_thread = thread_index % ROW_THREADS;
  device ELEMENT* score_row = scores + row_offset(params.score_rows, row);

  float items[ITEMS];
  UNROLL
  for (short i = 0; i < ITEMS; i++) { items[i] = -INFINITY; }
  for (uint block = begin / ITEMS * ITEMS; block < params.kv_length; block += ROW_BLOCK) {
    store_items(score_row, params.key_stride, begin, params.kv_length, block, row_thread, items);
  }
}
