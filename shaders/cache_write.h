// Writes new rows of K and V into a cache: K is rotated, and both are rounded or quantised.
//
// The kernel that includes this says ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, WIDE_LOADS (which then holds
// for the new rows too) and WIDE_STORES, and of what is on PAGE_SIZE, KV_ELEMENT, KV_FORMAT,
// K_SCALE, V_SCALE, V_IN_K and NEW_K_ROTARY with what rotary.h asks for. Buffers and their slots
// are the kernel's.
#pragma once

#include "features.h"
#include "paged.h"
#include "params.h"
#include "quantise.h"
#include "rotary.h"
#include "tile.h"
#include "tree.h"

FEATURE(WIDE_STORES)

// The tensors of a launch; those of features that are off are not set. Scales per head are only
// read.
struct AppendBuffers {
  const device ELEMENT* k;
  const device ELEMENT* v;
  device KV_ELEMENT* k_cache;
  device KV_ELEMENT* v_cache;
  device KV_SCALE_ELEMENT* k_scale;
  device KV_SCALE_ELEMENT* v_scale;
  const device ROTARY_ELEMENT* cos_table;
  const device ROTARY_ELEMENT* sin_table;
};

// Where the new rows of one sequence go.
struct AppendPlace {
  int first;                      // position of new row 0
  int64_t first_rotary;           // the row of cos and sin that rotates it
  TokenTree tree;                 // of the new rows, which then are rotated by their depth (TREE)
  const device int* block_table;  // of the sequence (PAGED)
  int cache_batch;                // unless PAGED
};

// Rows of one head of K or V: the new rows, and where they are stored.
template <int COLUMNS, bool ROTATED>
struct AppendRows {
  const device ELEMENT* rows;
  int64_t row_stride;
  device KV_ELEMENT* cache;
  int64_t cache_batch_stride;
  int64_t cache_row_stride;
  device KV_SCALE_ELEMENT* scales;  // KV_BLOCK_SCALES
  int64_t scale_batch_stride;
  int64_t scale_row_stride;
  float scale;          // of fp8_e4m3
  RotaryTables rotary;  // ROTATED
  int table_rows;

  METAL_FUNC void reset(const device ELEMENT* new_rows, constant RowStrides& strides,
                        device KV_ELEMENT* whole_cache, constant RowStrides& cache_strides,
                        int batch, int kv_head) thread {
    rows = new_rows + batch * strides.batch + kv_head * strides.head;
    row_stride = strides.row;
    cache = whole_cache + kv_head * cache_strides.head;
    cache_batch_stride = cache_strides.batch;
    cache_row_stride = cache_strides.row;
    scale = 1.0f;
  }

  METAL_FUNC void reset_scale(device KV_SCALE_ELEMENT* tensor, constant RowStrides& strides,
                              int batch, int kv_head) thread {
    if (KV_BLOCK_SCALES) {
      scales = tensor + kv_head * strides.head;
      scale_batch_stride = strides.batch;
      scale_row_stride = strides.row;
    } else {
      scale = float(tensor[batch * strides.batch + kv_head * strides.head]);
    }
  }

  // A unit of new row `row`, which row `rotary_row` of the tables rotates.
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

  METAL_FUNC void store(device KV_ELEMENT* cache_row, int column,
                        thread const CacheWord* words) const thread {
    device KV_ELEMENT* destination = cache_row + column / CACHE_UNIT * UNIT_ELEMENTS;
    if (WIDE_STORES) {
      UNROLL
      for (short i = 0; i < UNIT_STORES; i++) {
        reinterpret_cast<device CacheWord*>(destination)[i] = words[i];
      }
      return;
    }
    const thread KV_ELEMENT* elements = reinterpret_cast<const thread KV_ELEMENT*>(words);
    UNROLL
    for (short i = 0; i < UNIT_ELEMENTS; i++) {
      if (COLUMNS % CACHE_UNIT == 0 || column + i < COLUMNS) {
        destination[i] = elements[i];
      }
    }
  }

  // The unit as the cache holds it, at (batch, row) of which it is stored if it `exists`. Every
  // lane takes part, because lanes that share a scale exchange values.
  METAL_FUNC void round_and_store(thread const ELEMENT* elements, int64_t batch, int64_t cache_row,
                                  int column, bool exists, ushort lane) const thread {
    CacheWord words[UNIT_STORES];
    if (QUANTISED) {
      float values[CACHE_UNIT];
      UNROLL
      for (short i = 0; i < CACHE_UNIT; i++) {
        values[i] = float(elements[i]);
      }
      thread uchar* data = reinterpret_cast<thread uchar*>(words);
      if (KV_BLOCK_SCALES) {
        const half block_scale = quantise_unit(values, lane, data);
        if (exists && column % SCALE_COLUMNS == 0) {
          scales[batch * scale_batch_stride + cache_row * scale_row_stride +
                 column / SCALE_COLUMNS] = KV_SCALE_ELEMENT(block_scale);
        }
      } else {
        quantise_unit(values, scale, data);
      }
    } else {
      thread KV_ELEMENT* stored = reinterpret_cast<thread KV_ELEMENT*>(words);
      UNROLL
      for (short i = 0; i < CACHE_UNIT; i++) {
        stored[i] = KV_ELEMENT(elements[i]);
      }
    }
    if (exists) {
      store(cache + batch * cache_batch_stride + cache_row * cache_row_stride, column, words);
    }
  }

  // New rows [begin, end), which fit. Uniform in the threadgroup, whose SIMD groups are whole.
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

// Appends new rows [begin, end) of one (sequence, KV head), those that fit; `batch` is the
// sequence. Every thread of the threadgroup calls it, in uniform control flow. The
// threadgroup sees what was written after threadgroup_barrier(mem_flags::mem_device).
METAL_FUNC void append_rows(thread const AppendBuffers& buffers, thread const AppendPlace& place,
                            int batch, int kv_head, int begin, int end, int thread_index,
                            int threads, constant AppendParams& params) {
  AppendRows<HEAD_DIM_QK, NEW_K_ROTARY> k;
  AppendRows<HEAD_DIM_V, false> v;
  k.reset(buffers.k, params.k_strides, buffers.k_cache, params.k_cache_strides, batch, kv_head);
  v.reset(buffers.v, params.v_strides, buffers.v_cache, params.v_cache_strides, batch, kv_head);
  if (K_SCALE) {
    k.reset_scale(buffers.k_scale, params.k_scale_strides, batch, kv_head);
  }
  if (V_SCALE) {
    v.reset_scale(buffers.v_scale, params.v_scale_strides, batch, kv_head);
  }
  if (NEW_K_ROTARY) {
    k.rotary.reset(buffers.cos_table, params.cos_strides, buffers.sin_table, params.sin_strides, 0);
    k.table_rows = params.table_rows;
  }
  const int fitting = place.first < 0 ? 0 : min(end, params.capacity - place.first);
  k.append(place, begin, fitting, thread_index, threads, params);
  if (!V_IN_K) {
    v.append(place, begin, fitting, thread_index, threads, params);
  }
}
