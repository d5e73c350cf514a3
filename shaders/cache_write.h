// Writes new rows of K and V into a cache: K is rotated, and both are rounded or quantised.
//
// The including kernel defines ELEMENT, HEAD_DIM_QK, HEAD_DIM_V and the features that are on, and
// binds the buffers. WIDE_LOADS holds for the new rows, too.
#pragma once

#include "hadamard.h"
#include "paged.h"
#include "quantise.h"
#include "rotary.h"
#include "tree.h"

FEATURE(WIDE_STORES)

// The tensors of a launch. Tensors of features that are off are not set.
struct AppendBuffers {
  const device ELEMENT* k;
  const device ELEMENT* v;
  device KeyElement* k_cache;
  device ValueElement* v_cache;
  device ScaleElement<KV_FORMAT>* k_scale;
  device ScaleElement<V_FORMAT>* v_scale;
  const device ROTARY_ELEMENT* cos_table;
  const device ROTARY_ELEMENT* sin_table;
};

// The destination of one sequence's new rows.
struct AppendPlace {
  int first;                      // position of new row 0
  int64_t first_rotary;           // row of cos and sin for new row 0
  TokenTree tree;                 // its depths replace row numbers in the rotation (TREE)
  const device int* block_table;  // of the sequence (PAGED)
  int cache_batch;                // the sequence's batch index in the cache (unless PAGED)
};

// The new rows of one head of K or V, and their destination.
template <int FORMAT, int COLUMNS, bool ROTATED>
struct AppendRows {
  using Stored = StoredUnit<FORMAT>;
  using Element = typename Stored::Element;
  using Word = typename Stored::Word;
  using Scale = ScaleElement<FORMAT>;
  const device ELEMENT* rows;
  int64_t row_stride;
  device Element* cache;
  int64_t cache_batch_stride;
  int64_t cache_row_stride;
  device Scale* scales;  // kv_row_scales
  int64_t scale_batch_stride;
  int64_t scale_row_stride;
  float scale;          // the scale of all rows, in fp8_e4m3
  RotaryTables rotary;  // ROTATED
  int table_rows;

  METAL_FUNC void reset(const device ELEMENT* new_rows, constant RowStrides& strides,
                        device Element* whole_cache, constant RowStrides& cache_strides, int batch,
                        int kv_head) thread {
    rows = new_rows + batch * strides.batch + kv_head * strides.head;
    row_stride = strides.row;
    cache = whole_cache + kv_head * cache_strides.head;
    cache_batch_stride = cache_strides.batch;
    cache_row_stride = cache_strides.row;
    scale = 1.0f;
  }

  METAL_FUNC void reset_scale(device Scale* tensor, constant RowStrides& strides, int batch,
                              int kv_head) thread {
    if (kv_row_scales(FORMAT)) {
      scales = tensor + kv_head * strides.head;
      scale_batch_stride = strides.batch;
      scale_row_stride = strides.row;
    } else {
      scale = float(tensor[batch * strides.batch + kv_head * strides.head]);
    }
  }

  // Loads a unit of new row `row`, rotated by row `rotary_row` of the tables.
  METAL_FUNC void load(int row, int64_t rotary_row, int column, thread uint4* chunks) const thread {
    constexpr int CHUNK = chunk_elements<ELEMENT>();
    const device ELEMENT* new_row = rows + row * row_stride;
    if (ROTATED) {
      const bool in_table = rotary_row >= 0 && rotary_row < table_rows;
      UNROLL
      for (short i = 0; i < CACHE_UNIT / CHUNK; i++) {
        chunks[i] = rotary.rotated_chunk<COLUMNS>(new_row, 0, in_table ? int(rotary_row) : 0,
                                                  column + i * CHUNK);
      }
      // The tables have no such row, so the result is NaN.
      thread ELEMENT* elements = reinterpret_cast<thread ELEMENT*>(chunks);
      for (short i = 0; !in_table && i < CACHE_UNIT; i++) {
        elements[i] = is_rotated(column + i) ? ELEMENT(NAN) : elements[i];
      }
      return;
    }
    UNROLL
    for (short i = 0; i < CACHE_UNIT / CHUNK; i++) {
      chunks[i] = load_chunk<COLUMNS>(new_row, 0, column + i * CHUNK);
    }
  }

  METAL_FUNC void store(device Element* cache_row, int column,
                        thread const Word* words) const thread {
    device Element* destination = cache_row + column / CACHE_UNIT * Stored::ELEMENTS;
    if (WIDE_STORES) {
      UNROLL
      for (short i = 0; i < Stored::STORES; i++) {
        reinterpret_cast<device Word*>(destination)[i] = words[i];
      }
      return;
    }
    const thread Element* elements = reinterpret_cast<const thread Element*>(words);
    UNROLL
    for (short i = 0; i < Stored::ELEMENTS; i++) {
      if (COLUMNS % CACHE_UNIT == 0 || column + i < COLUMNS) { destination[i] = elements[i]; }
    }
  }

  // Stores a scale, and a group's minimum. Only the lane that has the group's first columns stores.
  METAL_FUNC void store_scale(half2 numbers, int64_t batch, int64_t cache_row, int column,
                              bool exists) const thread {
    constexpr int SHARED = kv_scale_columns(FORMAT);
    constexpr int NUMBERS = kv_scale_numbers(FORMAT);
    if (exists && column % SHARED == 0) {
      UNROLL
      for (short i = 0; i < NUMBERS; i++) {
        scales[batch * scale_batch_stride + cache_row * scale_row_stride +
               column / SHARED * NUMBERS + i] = Scale(numbers[i]);
      }
    }
  }

  // Converts a unit to the cache's format and stores it if it `exists`. All lanes call it, because
  // lanes that share a scale exchange values.
  METAL_FUNC void round_and_store(thread const ELEMENT* elements, int64_t batch, int64_t cache_row,
                                  int column, bool exists, ushort lane) const thread {
    Word words[Stored::STORES];
    if (FORMAT != 0) {
      float values[CACHE_UNIT];
      UNROLL
      for (short i = 0; i < CACHE_UNIT; i++) { values[i] = float(elements[i]); }
      if (HADAMARD) { hadamard_unit(values, lane); }
      thread uchar* data = reinterpret_cast<thread uchar*>(words);
      if (kv_grouped(FORMAT)) {
        uint codes;
        const half2 numbers = quantise_group<FORMAT>(values, codes);
        UNROLL
        for (short i = 0; i < Stored::BYTES; i++) { data[i] = uchar(codes >> (8 * i)); }
        store_scale(numbers, batch, cache_row, column, exists);
      } else if (kv_span_scaled(FORMAT)) {
        const half block_scale = quantise_unit<FORMAT>(values, lane, data);
        store_scale(half2(block_scale, 0), batch, cache_row, column, exists);
      } else {
        quantise_unit(values, scale, data);
      }
    } else {
      thread Element* stored = reinterpret_cast<thread Element*>(words);
      UNROLL
      for (short i = 0; i < CACHE_UNIT; i++) { stored[i] = Element(elements[i]); }
    }
    if (exists) {
      store(cache + batch * cache_batch_stride + cache_row * cache_row_stride, column, words);
    }
  }

  // Appends new rows [begin, end). All threads call it, and all SIMD groups have 32 threads.
  METAL_FUNC void append(thread const AppendPlace& place, int begin, int end, int thread_index,
                         int threads, constant AppendParams& params) const thread {
    constexpr int UNITS = (COLUMNS + CACHE_UNIT - 1) / CACHE_UNIT;  // of a row
    const int units = (end - begin) * UNITS;
    const ushort lane = thread_index % SIMD_LANES;
    PageTable pages;
    pages.reset(place.block_table, place.first + end, params.cache_size);
    for (int first = 0; first < units; first += threads) {
      const int unit = first + thread_index;
      const int row = begin + min(unit, units - 1) / UNITS;
      const int column = unit % UNITS * CACHE_UNIT;
      const int position = place.first + row;
      int64_t batch = place.cache_batch;
      if (PAGED) {
        const int simdgroup_row = begin + min(unit - lane, units - 1) / UNITS;
        pages.move_to(place.first + simdgroup_row, SIMD_LANES, lane);
        batch = pages.page_of(position);
      }
      const bool exists =
          unit < units && (PAGED ? batch != NO_PAGE : batch >= 0 && batch < params.cache_size);
      uint4 chunks[CACHE_UNIT / chunk_elements<ELEMENT>()] = {};
      if (exists) {
        const int step = TREE && ROTATED ? place.tree.depth_of(row) : row;
        load(row, place.first_rotary + step, column, chunks);
      }
      const thread ELEMENT* elements = reinterpret_cast<const thread ELEMENT*>(chunks);
      round_and_store(elements, batch, pages.row_in_page(position), column, exists, lane);
    }
  }
};

// Appends the new rows [begin, end) of one (sequence, KV head) that fit into the cache. All threads
// call it, in uniform control flow. The threadgroup may read the rows after
// threadgroup_barrier(mem_flags::mem_device).
METAL_FUNC void append_rows(thread const AppendBuffers& buffers, thread const AppendPlace& place,
                            int batch, int kv_head, int begin, int end, int thread_index,
                            int threads, constant AppendParams& params) {
  AppendRows<KV_FORMAT, HEAD_DIM_QK, NEW_K_ROTARY> k;
  AppendRows<V_FORMAT, HEAD_DIM_V, false> v;
  k.reset(buffers.k, params.k_strides, buffers.k_cache, params.k_cache_strides, batch, kv_head);
  v.reset(buffers.v, params.v_strides, buffers.v_cache, params.v_cache_strides, batch, kv_head);
  if (K_SCALE) { k.reset_scale(buffers.k_scale, params.k_scale_strides, batch, kv_head); }
  if (V_SCALE) { v.reset_scale(buffers.v_scale, params.v_scale_strides, batch, kv_head); }
  if (NEW_K_ROTARY) {
    k.rotary.reset(buffers.cos_table, params.cos_strides, buffers.sin_table, params.sin_strides, 0);
    k.table_rows = params.table_rows;
  }
  const int fitting = place.first < 0 ? 0 : min(end, params.capacity - place.first);
  k.append(place, begin, fitting, thread_index, threads, params);
  if (!V_IN_K) { v.append(place, begin, fitting, thread_index, threads, params); }
}
