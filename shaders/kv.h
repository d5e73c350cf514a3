// Where the K and V rows of one (sequence, KV head) lie, and how blocks of them are staged.
#pragma once

#include "rotary.h"
#include "tile.h"

// Rows at a fixed stride, K_COLUMNS and V_COLUMNS long.
template <typename T, int K_COLUMNS, int V_COLUMNS>
struct DenseKV {
  const device T* k;
  const device T* v;
  int64_t k_row_stride;
  int64_t v_row_stride;
  int first;  // keys [first, length) exist; the memory of those before may hold anything
  int length;
#if K_ROTARY
  RotaryTables rotary;
#endif

  // 16 bytes of a row, from `column` on.
  METAL_FUNC uint4 k_chunk(int key, int column) const thread {
    const device T* row = k + key * k_row_stride;
#if K_ROTARY
    return rotary.turn_chunk<K_COLUMNS>(row, key, column);
#else
    return load_chunk<K_COLUMNS>(row, column);
#endif
  }

  // 0 behind the end of a row, which the last slice of V may pass by more than a fragment.
  METAL_FUNC uint4 v_chunk(int key, int column) const thread {
    if (V_COLUMNS % V_SLICE != 0 && column >= V_COLUMNS) {
      return uint4(0);
    }
    return load_chunk<V_COLUMNS>(v + key * v_row_stride, column);
  }

  METAL_FUNC bool exists(int key) const thread {
#if LEFTPAD_K
    return key >= first && key < length;
#else
    return key < length;
#endif
  }
};

// Stages keys [first_key, first_key + BLOCK) as pairs: k_tile[key / 2][column] holds the elements
// (key, column) and (key + 1, column) side by side, so that a lane's two neighbouring keys of a
// transposed K fragment are one load. Keys past the end repeat the last one; the mask hides them.
template <typename T, int BLOCK, int COLUMNS, int THREADS, typename KV>
METAL_FUNC void stage_k(threadgroup uint4* k_tile, thread const KV& kv, int first_key,
                        int thread_index) {
  constexpr int CHUNK = chunk_elements<T>();
  constexpr int CHUNKS = COLUMNS / CHUNK;                   // of one row
  constexpr int TILE_CHUNKS = padded(COLUMNS) * 2 / CHUNK;  // of one row of pairs
  constexpr int UNITS = BLOCK / 2 * CHUNKS;
  UNROLL
  for (int i = 0; i < (UNITS + THREADS - 1) / THREADS; i++) {
    const int unit = thread_index + i * THREADS;
    if (UNITS % THREADS == 0 || unit < UNITS) {
      const int pair = unit / CHUNKS;
      const int chunk = unit % CHUNKS;
      const int last = kv.length - 1;
      const uint4 even_key = kv.k_chunk(min(first_key + 2 * pair, last), chunk * CHUNK);
      const uint4 odd_key = kv.k_chunk(min(first_key + 2 * pair + 1, last), chunk * CHUNK);
      uint4 low;
      uint4 high;
      interleave<T>(even_key, odd_key, low, high);
      threadgroup uint4* destination = k_tile + pair * TILE_CHUNKS + 2 * chunk;
      destination[0] = low;
      destination[1] = high;
    }
  }
}

// Stages columns [first_column, first_column + COLUMNS) of the same keys' V rows as they are. Rows
// that do not exist are zero: their weight is zero, and zero times whatever lies there must stay
// zero.
template <typename T, int BLOCK, int COLUMNS, int THREADS, typename KV>
METAL_FUNC void stage_v(threadgroup uint4* v_tile, thread const KV& kv, int first_key,
                        int first_column, int thread_index) {
  constexpr int CHUNK = chunk_elements<T>();
  constexpr int CHUNKS = COLUMNS / CHUNK;
  constexpr int TILE_CHUNKS = padded(COLUMNS) / CHUNK;
  constexpr int UNITS = BLOCK * CHUNKS;
  UNROLL
  for (int i = 0; i < (UNITS + THREADS - 1) / THREADS; i++) {
    const int unit = thread_index + i * THREADS;
    if (UNITS % THREADS == 0 || unit < UNITS) {
      const int row = unit / CHUNKS;
      const int chunk = unit % CHUNKS;
      const int key = first_key + row;
      const uint4 values = kv.v_chunk(min(key, kv.length - 1), first_column + chunk * CHUNK);
      v_tile[row * TILE_CHUNKS + chunk] = kv.exists(key) ? values : uint4(0);
    }
  }
}
