// Rotates rows of q or k as they are loaded, so that rotated rows are never written to memory.
#pragma once

#include "rope.h"
#include "tile.h"

// Without rotation there are no tables.
#ifndef ROTARY_DIM
#define ROTARY_DIM 0
#define ROTARY_ELEMENT float
#endif

// The first column that is rotated.
#ifndef ROTARY_FIRST
#define ROTARY_FIRST 0
#endif

constant constexpr int ROTARY_PAIRS = ROTARY_DIM / 2;

METAL_FUNC bool is_rotated(int column) {
  return (ROTARY_FIRST == 0 || column >= ROTARY_FIRST) && column < ROTARY_FIRST + ROTARY_DIM;
}

// Loads COUNT neighbouring entries of a table as float, WIDTH at a time.
template <int COUNT, int WIDTH>
METAL_FUNC void load_entries(const device ROTARY_ELEMENT* table, thread float* entries) {
  using Entries = vec<ROTARY_ELEMENT, WIDTH>;
  UNROLL
  for (short i = 0; i < COUNT; i += WIDTH) {
    const Entries read = *reinterpret_cast<const device Entries*>(table + i);
    UNROLL
    for (short j = 0; j < WIDTH; j++) { entries[i + j] = float(read[j]); }
  }
}

// cos and sin of one sequence, [length, ROTARY_PAIRS]: row i rotates row i of q or k.
struct RotaryTables {
  const device ROTARY_ELEMENT* cosines;
  const device ROTARY_ELEMENT* sines;
  Offset first_cosines;
  Offset first_sines;
  Offset cosines_stride;
  Offset sines_stride;

  METAL_FUNC void reset(const device ROTARY_ELEMENT* cos_table, constant TableStrides& cos_strides,
                        const device ROTARY_ELEMENT* sin_table, constant TableStrides& sin_strides,
                        int batch) thread {
    cosines = cos_table;
    sines = sin_table;
    first_cosines = Offset(batch) * Offset(cos_strides.batch);
    first_sines = Offset(batch) * Offset(sin_strides.batch);
    cosines_stride = Offset(cos_strides.row);
    sines_stride = Offset(sin_strides.row);
  }

  // Makes row `first` of the tables the row of position 0; of all positions if not `advances`.
  METAL_FUNC void start_at(int64_t first, bool advances) thread {
    first_cosines += Offset(first) * cosines_stride;
    first_sines += Offset(first) * sines_stride;
    cosines_stride = advances ? cosines_stride : 0;
    sines_stride = advances ? sines_stride : 0;
  }

  METAL_FUNC Offset cosines_of(int position) const thread {
    return first_cosines + Offset(position) * cosines_stride;
  }

  METAL_FUNC Offset sines_of(int position) const thread {
    return first_sines + Offset(position) * sines_stride;
  }

  // A rotated column of the row at offset `row`, whose position is `position`.
  template <typename T>
  METAL_FUNC T rotated(const device T* tensor, Offset row, int position, int column) const thread {
    if (!is_rotated(column)) { return tensor[row + column]; }
    const int offset = column - ROTARY_FIRST;
    const int pair = rotary_pair(offset, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    const int partner = ROTARY_FIRST + rotary_partner(offset, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    return T(rotate_column(float(tensor[row + column]), float(tensor[row + partner]),
                           float(cosines[cosines_of(position) + pair]),
                           float(sines[sines_of(position) + pair]),
                           rotary_is_x(offset, ROTARY_PAIRS, ROTARY_INTERLEAVED)));
  }

  // Column `first` + `lane_column` and the next column, rotated. Pairs are interleaved, or all
  // columns of the fragment that begins at `first` are in one half. Each index is a constant plus a
  // number of the lane: other indices would take a register for each fragment throughout a loop.
  template <typename T>
  METAL_FUNC vec<T, LANE_COLUMNS> rotated_pair(const device T* tensor, Offset row, int position,
                                               int first, int lane_column) const thread {
    const device T* x = tensor + (row + first + lane_column);
    const device ROTARY_ELEMENT* cosine = cosines + cosines_of(position);
    const device ROTARY_ELEMENT* sine = sines + sines_of(position);
    if (ROTARY_INTERLEAVED) {
      const int pair = (first - ROTARY_FIRST) / 2 + lane_column / 2;
      const float2 xy =
          rotate_pair(float(x[0]), float(x[1]), float(cosine[pair]), float(sine[pair]));
      return vec<T, LANE_COLUMNS>(T(xy.x), T(xy.y));
    }
    const bool is_x = first < ROTARY_FIRST + ROTARY_PAIRS;
    const int partner = first + (is_x ? ROTARY_PAIRS : -ROTARY_PAIRS);
    const int pair = min(first, partner) - ROTARY_FIRST + lane_column;
    const device T* y = tensor + (row + partner + lane_column);
    return vec<T, LANE_COLUMNS>(
        T(rotate_column(float(x[0]), float(y[0]), float(cosine[pair]), float(sine[pair]), is_x)),
        T(rotate_column(float(x[1]), float(y[1]), float(cosine[pair + 1]), float(sine[pair + 1]),
                        is_x)));
  }

  // 16 bytes of a rotated row, from `column` on; 0 for columns from COLUMNS on.
  template <int COLUMNS, typename T>
  METAL_FUNC uint4 rotated_chunk(const device T* tensor, Offset row, int position,
                                 int column) const thread {
    constexpr int CHUNK = chunk_elements<T>();
    uint4 chunk = uint4(0);
    thread T* values = reinterpret_cast<thread T*>(&chunk);
    if (!WIDE_ROTARY) {
      UNROLL
      for (short i = 0; i < CHUNK; i++) {
        if (COLUMNS % FRAGMENT == 0 || column + i < COLUMNS) {
          values[i] = rotated(tensor, row, position, column + i);
        }
      }
      return chunk;
    }
    chunk = load_chunk<COLUMNS>(tensor, row, column);
    if (!is_rotated(column)) { return chunk; }
    const int offset = column - ROTARY_FIRST;
    const int pair = rotary_pair(offset, ROTARY_PAIRS, ROTARY_INTERLEAVED);
    const device ROTARY_ELEMENT* first_cosine = cosines + (cosines_of(position) + pair);
    const device ROTARY_ELEMENT* first_sine = sines + (sines_of(position) + pair);
    if (ROTARY_INTERLEAVED) {
      constexpr int PAIRS = CHUNK / 2;
      constexpr int WIDTH = PAIRS < 4 ? PAIRS : 4;
      float cosine[PAIRS];
      float sine[PAIRS];
      load_entries<PAIRS, WIDTH>(first_cosine, cosine);
      load_entries<PAIRS, WIDTH>(first_sine, sine);
      UNROLL
      for (short i = 0; i < PAIRS; i++) {
        const float2 xy =
            rotate_pair(float(values[2 * i]), float(values[2 * i + 1]), cosine[i], sine[i]);
        values[2 * i] = T(xy.x);
        values[2 * i + 1] = T(xy.y);
      }
      return chunk;
    }
    const bool is_x = offset < ROTARY_PAIRS;
    uint4 partners = load_chunk<COLUMNS>(
        tensor, row, ROTARY_FIRST + rotary_partner(offset, ROTARY_PAIRS, ROTARY_INTERLEAVED));
    const thread T* partner = reinterpret_cast<const thread T*>(&partners);
    float cosine[CHUNK];
    float sine[CHUNK];
    load_entries<CHUNK, 4>(first_cosine, cosine);
    load_entries<CHUNK, 4>(first_sine, sine);
    UNROLL
    for (short i = 0; i < CHUNK; i++) {
      values[i] = T(rotate_column(float(values[i]), float(partner[i]), cosine[i], sine[i], is_x));
    }
    return chunk;
  }
};
