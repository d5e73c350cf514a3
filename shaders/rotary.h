// Rotates rows of q or k as they are loaded, so that rotated rows are never written to memory.
#pragma once

#include "features.h"
#include "rope.h"
#include "tile.h"

// Where nothing is rotated, there are no tables.
#ifndef ROTARY_DIM
#define ROTARY_DIM 0
#define ROTARY_ELEMENT float
#endif

constant constexpr int ROTARY_PAIRS = ROTARY_DIM / 2;

// COUNT neighbouring entries of a table, as float, WIDTH at a time.
template <int COUNT, int WIDTH>
METAL_FUNC void load_entries(const device ROTARY_ELEMENT* table, thread float* entries) {
  using Entries = vec<ROTARY_ELEMENT, WIDTH>;
  UNROLL
  for (short i = 0; i < COUNT; i += WIDTH) {
    const Entries read = *reinterpret_cast<const device Entries*>(table + i);
    UNROLL
    for (short j = 0; j < WIDTH; j++) {
      entries[i + j] = float(read[j]);
    }
  }
}

// cos and sin of one sequence, [length, ROTARY_PAIRS]: row i rotates row i of q or k.
struct RotaryTables {
  const device ROTARY_ELEMENT* cosines;
  const device ROTARY_ELEMENT* sines;
  int64_t cosines_stride;
  int64_t sines_stride;

  METAL_FUNC void reset(const device ROTARY_ELEMENT* cos_table, constant TableStrides& cos_strides,
                        const device ROTARY_ELEMENT* sin_table, constant TableStrides& sin_strides,
                        int batch) thread {
    cosines = cos_table + batch * cos_strides.batch;
    sines = sin_table + batch * sin_strides.batch;
    cosines_stride = cos_strides.row;
    sines_stride = sin_strides.row;
  }

  // Row i then means row `first` + i of the tables, or without `advances` always row `first`.
  METAL_FUNC void start_at(int64_t first, bool advances) thread {
    cosines += first * cosines_stride;
    sines += first * sines_stride;
    cosines_stride = advances ? cosines_stride : 0;
    sines_stride = advances ? sines_stride : 0;
  }

  // One column of row `position`, rotated and rounded to its own type.
  template <typename T>
  METAL_FUNC T rotated(const device T* row, int position, int column) const thread {
    if (column >= ROTARY_DIM) {
      return row[column];
    }
    const int pair = rotary_pair(column, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    const int partner = rotary_partner(column, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    return T(rotate_column(float(row[column]), float(row[partner]),
                           float(cosines[position * cosines_stride + pair]),
                           float(sines[position * sines_stride + pair]),
                           rotary_is_x(column, ROTARY_PAIRS, ROTARY_INTERLEAVED)));
  }

  // 16 bytes of row `position`, which is COLUMNS long, from `column` on; 0 behind its end.
  template <int COLUMNS, typename T>
  METAL_FUNC uint4 rotated_chunk(const device T* row, int position, int column) const thread {
    constexpr int CHUNK = chunk_elements<T>();
    uint4 chunk = uint4(0);
    thread T* values = reinterpret_cast<thread T*>(&chunk);
    if (!WIDE_ROTARY) {
      UNROLL
      for (short i = 0; i < CHUNK; i++) {
        if (COLUMNS % FRAGMENT == 0 || column + i < COLUMNS) {
          values[i] = rotated(row, position, column + i);
        }
      }
      return chunk;
    }
    chunk = load_chunk<COLUMNS>(row, column);
    if (column >= ROTARY_DIM) {
      return chunk;
    }
    const device ROTARY_ELEMENT* cosines_row = cosines + position * cosines_stride;
    const device ROTARY_ELEMENT* sines_row = sines + position * sines_stride;
    const int pair = rotary_pair(column, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    if (ROTARY_INTERLEAVED) {
      constexpr int PAIRS = CHUNK / 2;
      constexpr int WIDTH = PAIRS < 4 ? PAIRS : 4;
      float cosine[PAIRS];
      float sine[PAIRS];
      load_entries<PAIRS, WIDTH>(cosines_row + pair, cosine);
      load_entries<PAIRS, WIDTH>(sines_row + pair, sine);
      UNROLL
      for (short i = 0; i < PAIRS; i++) {
        const float2 xy =
            rotate(float(values[2 * i]), float(values[2 * i + 1]), cosine[i], sine[i]);
        values[2 * i] = T(xy.x);
        values[2 * i + 1] = T(xy.y);
      }
      return chunk;
    }
    const bool is_x = column < ROTARY_PAIRS;
    uint4 partners =
        load_chunk<COLUMNS>(row, rotary_partner(column, ROTARY_PAIRS, ROTARY_INTERLEAVED));
    const thread T* partner = reinterpret_cast<const thread T*>(&partners);
    float cosine[CHUNK];
    float sine[CHUNK];
    load_entries<CHUNK, 4>(cosines_row + pair, cosine);
    load_entries<CHUNK, 4>(sines_row + pair, sine);
    UNROLL
    for (short i = 0; i < CHUNK; i++) {
      values[i] = T(rotate_column(float(values[i]), float(partner[i]), cosine[i], sine[i], is_x));
    }
    return chunk;
  }
};
