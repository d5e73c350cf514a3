// Blocks of K and V whose loads from device memory begin before their tiles may be written.
//
// The tiles are those of stage_pairs and stage_rows. These do both in one go, which takes fewer
// registers: here chunks of a whole block stay in them.
#pragma once

#include "inputs.h"

// LOADS_BEFORE_BARRIER or LOADS_BEFORE_PRODUCTS; 0: a block is loaded when it is staged.
#ifndef LOADS_AHEAD
#define LOADS_AHEAD 0
#endif

// How COUNT units of a block are dealt to THREADS in ROUNDS. A unit is what a thread loads at once.
template <int COUNT, int THREADS>
struct Deal {
  static constant constexpr int ROUNDS = (COUNT + THREADS - 1) / THREADS;

  METAL_FUNC static bool owns(int unit) { return COUNT % THREADS == 0 || unit < COUNT; }

  // A thread without a unit in the last round loads the last one: a branch around loads would keep
  // more registers.
  METAL_FUNC static int existing(int unit) { return min(unit, COUNT - 1); }
};

// One chunk of two neighbouring rows of K.
template <typename T, int COLUMNS>
struct KeyChunks {
  static constant constexpr int CHUNK = chunk_elements<T>();
  static constant constexpr int CHUNKS = COLUMNS / CHUNK;                   // of one row
  static constant constexpr int TILE_CHUNKS = padded(COLUMNS) * 2 / CHUNK;  // of one row of pairs
  uint4 even_row;
  uint4 odd_row;

  // Rows past the last repeat it: a mask hides them. Uniform, as the lookup of rows may shuffle.
  METAL_FUNC void load(thread const Keys& source, int first, int end, int unit) thread {
    const int row = first + 2 * (unit / CHUNKS);
    const int column = unit % CHUNKS * CHUNK;
    even_row = source.chunk(source.find(min(row, end - 1)), column);
    odd_row = source.chunk(source.find(min(row + 1, end - 1)), column);
  }

  METAL_FUNC void store(threadgroup uint4* tile, int unit) const thread {
    uint4 low;
    uint4 high;
    interleave<T>(even_row, odd_row, low, high);
    threadgroup uint4* destination = tile + unit / CHUNKS * TILE_CHUNKS + 2 * (unit % CHUNKS);
    destination[0] = low;
    destination[1] = high;
  }
};

// One chunk of a row of V.
template <typename T, int COLUMNS, int ROW_COLUMNS>
struct ValueChunk {
  static constant constexpr int CHUNK = chunk_elements<T>();
  static constant constexpr int CHUNKS = COLUMNS / CHUNK;
  static constant constexpr int TILE_CHUNKS = padded(COLUMNS) / CHUNK;
  uint4 values;

  // Rows outside [begin, end) are zero, as of stage_rows, and columns that do not exist. Uniform.
  METAL_FUNC void load(thread const Values& source, int first, int begin, int end, int first_column,
                       int unit) thread {
    const int row = first + unit / CHUNKS;
    const int column = first_column + unit % CHUNKS * CHUNK;
    const typename Values::Place place = source.find(min(row, end - 1));
    values = uint4(0);
    if (ROW_COLUMNS % COLUMNS == 0 || column < ROW_COLUMNS) {
      values = source.chunk(place, column);
    }
    values = row >= begin && row < end ? values : uint4(0);
  }

  METAL_FUNC void store(threadgroup uint4* tile, int unit) const thread {
    tile[unit / CHUNKS * TILE_CHUNKS + unit % CHUNKS] = values;
  }
};

// A thread's share of one block on its way from device memory to both tiles: `load`, then `store`.
template <typename T, int BLOCK, int K_COLUMNS, int V_COLUMNS, int V_ROW_COLUMNS, int THREADS>
struct BlockAhead {
  using KeyDeal = Deal<BLOCK / 2 * KeyChunks<T, K_COLUMNS>::CHUNKS, THREADS>;
  using ValueDeal = Deal<BLOCK * ValueChunk<T, V_COLUMNS, V_ROW_COLUMNS>::CHUNKS, THREADS>;
  KeyChunks<T, K_COLUMNS> k[KeyDeal::ROUNDS];
  ValueChunk<T, V_COLUMNS, V_ROW_COLUMNS> v[ValueDeal::ROUNDS];

  METAL_FUNC void load(thread Keys& keys, thread Values& values, thread const Sequence& sequence,
                       int first, int first_v_column, int thread_index, ushort lane) thread {
    move_to(keys, values, first, BLOCK, lane);
    UNROLL
    for (int i = 0; i < KeyDeal::ROUNDS; i++) {
      const int unit = KeyDeal::existing(thread_index + i * THREADS);
      k[i].load(keys, first, sequence.kv_length, unit);
    }
    UNROLL
    for (int i = 0; i < ValueDeal::ROUNDS; i++) {
      const int unit = ValueDeal::existing(thread_index + i * THREADS);
      v[i].load(values, first, sequence.first_key, sequence.kv_length, first_v_column, unit);
    }
  }

  METAL_FUNC void store(threadgroup uint4* k_tile, threadgroup uint4* v_tile,
                        int thread_index) const thread {
    UNROLL
    for (int i = 0; i < KeyDeal::ROUNDS; i++) {
      const int unit = thread_index + i * THREADS;
      if (KeyDeal::owns(unit)) {
        k[i].store(k_tile, unit);
      }
    }
    UNROLL
    for (int i = 0; i < ValueDeal::ROUNDS; i++) {
      const int unit = thread_index + i * THREADS;
      if (ValueDeal::owns(unit)) {
        v[i].store(v_tile, unit);
      }
    }
  }
};
