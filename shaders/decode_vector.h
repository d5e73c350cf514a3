// The values of few rows of q, summed up without the matrix unit, most of whose rows were empty.
//
// A value's row is shared by KEY_LANES lanes, which have units of 8 columns at a distance of
// KEY_LANES units, so that a SIMD group loads LOAD_KEYS whole rows at a time. A lane adds up what
// its own keys contribute to its columns of every row of out; lanes meet only at the end.
#pragma once

#include "decode_tile.h"

#if VECTOR_ROWS

constant constexpr int LOAD_KEYS = SIMD_LANES / KEY_LANES;
constant constexpr int LOADS = BLOCK_K / LOAD_KEYS;
constant constexpr int V_UNITS = V_PADDED / (UNIT_COLUMNS * KEY_LANES);
// Whether no lane has a unit behind a row's end.
constant constexpr bool WHOLE_UNITS = HEAD_DIM_V == V_PADDED;
// A lane's columns of a unit, once the sums of all keys are shared out.
constant constexpr int OUT_COLUMNS = UNIT_COLUMNS / LOAD_KEYS;

// The first column of a lane's unit u.
METAL_FUNC int value_column(short u, ushort lane) {
  return (u * KEY_LANES + lane % KEY_LANES) * UNIT_COLUMNS;
}

// A lane's sums for [ROWS, Dv].
struct VectorOut {
  Fragment<float> pairs[ROWS][V_UNITS][SPAN_FRAGMENTS];

  METAL_FUNC void fill(float value) thread {
    UNROLL
    for (short r = 0; r < ROWS; r++) {
      UNROLL
      for (short u = 0; u < V_UNITS; u++) {
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          pairs[r][u][f] = Fragment<float>(value, value);
        }
      }
    }
  }

  // Adds up the sums of lanes with other keys, and writes each row's times its share. A negative
  // share is that of a row that sees nothing.
  METAL_FUNC void store(threadgroup float* rows, const threadgroup float* shares,
                        ushort lane) const thread {
    UNROLL
    for (short r = 0; r < ROWS; r++) {
      const float share = shares[r];
      UNROLL
      for (short u = 0; u < V_UNITS; u++) {
        float sums[UNIT_COLUMNS];
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          sums[2 * f] = pairs[r][u][f].x;
          sums[2 * f + 1] = pairs[r][u][f].y;
        }
        // Of a pair of lanes each keeps half of the columns, and gives the other half away.
        short count = UNIT_COLUMNS;
        short first = 0;
        UNROLL
        for (ushort bit = KEY_LANES; bit < SIMD_LANES; bit *= 2) {
          count /= 2;
          const bool upper = (lane & bit) != 0;
          first += upper ? count : short(0);
          UNROLL
          for (short n = 0; n < count; n++) {
            const float given = upper ? sums[n] : sums[n + count];
            const float kept = upper ? sums[n + count] : sums[n];
            sums[n] = kept + simd_shuffle_xor(given, bit);
          }
        }
        threadgroup float* place = rows + r * V_PADDED + value_column(u, lane) + first;
        UNROLL
        for (short n = 0; n < OUT_COLUMNS; n++) {
          place[n] = share < 0.0f ? 0.0f : sums[n] * share;
        }
      }
    }
  }
};

// A lane's units of the values of a block of keys.
struct VectorValues {
  Unit<KvTileElement> units[LOADS][V_UNITS];
#if KV_BLOCK_SCALES
  uint2 codes[LOADS][V_UNITS];
  float scales[LOADS][V_UNITS];
#endif

  METAL_FUNC void load(thread const Values& values, int first_key, thread const Sequence& sequence,
                       ushort lane) thread {
    UNROLL
    for (short n = 0; n < LOADS; n++) {
      const int key = first_key + n * LOAD_KEYS + lane / KEY_LANES;
      const typename Values::Place place = values.find(min(key, sequence.kv_length - 1));
      UNROLL
      for (short u = 0; u < V_UNITS; u++) {
        const int column = value_column(u, lane);
#if KV_BLOCK_SCALES
        const bool inside = WHOLE_UNITS || column < HEAD_DIM_V;
        scales[n][u] = inside ? values.span_scale(place, column / SPAN_COLUMNS) : 0.0f;
        codes[n][u] = inside ? values.codes(place, column) : uint2(0);
#else
        units[n][u].template load<HEAD_DIM_V, WHOLE_UNITS>(values, place, column, true);
#endif
      }
    }
    if (first_key < sequence.first_key || first_key + BLOCK_K > sequence.kv_length) {
      clear(first_key, sequence, lane);
    }
  }

  // Values that do not exist: their weight is zero, and zero times whatever lies there must stay
  // zero.
  METAL_FUNC void clear(int first_key, thread const Sequence& sequence, ushort lane) thread {
    UNROLL
    for (short n = 0; n < LOADS; n++) {
      const int key = first_key + n * LOAD_KEYS + lane / KEY_LANES;
      if (key < sequence.first_key || key >= sequence.kv_length) {
        UNROLL
        for (short u = 0; u < V_UNITS; u++) {
#if KV_BLOCK_SCALES
          scales[n][u] = 0.0f;
#else
          units[n][u].fill(KvTileElement(0));
#endif
        }
      }
    }
  }

  // o = o * corrections + weights v; the weights are [BLOCK_K, ROWS], and corrections follow them.
  METAL_FUNC void accumulate(thread VectorOut& o, const threadgroup float* weights,
                             ushort lane) thread {
    float corrections[ROWS];
    UNROLL
    for (short r = 0; r < ROWS; r++) {
      corrections[r] = weights[BLOCK_K * ROWS + r];
    }
    float own[LOADS][ROWS];
    UNROLL
    for (short n = 0; n < LOADS; n++) {
      UNROLL
      for (short r = 0; r < ROWS; r++) {
        own[n][r] = weights[(n * LOAD_KEYS + lane / KEY_LANES) * ROWS + r];
      }
    }
    UNROLL
    for (short u = 0; u < V_UNITS; u++) {
      float unit_weights[LOADS][ROWS];
      UNROLL
      for (short n = 0; n < LOADS; n++) {
#if KV_BLOCK_SCALES
        units[n][u].expand_codes(codes[n][u]);
#endif
        UNROLL
        for (short r = 0; r < ROWS; r++) {
#if KV_BLOCK_SCALES
          unit_weights[n][r] = own[n][r] * scales[n][u];
#else
          unit_weights[n][r] = own[n][r];
#endif
        }
      }
      UNROLL
      for (short f = 0; f < SPAN_FRAGMENTS; f++) {
        Fragment<float> block[ROWS];
        UNROLL
        for (short n = 0; n < LOADS; n++) {
          const Fragment<KvTileElement> pair = units[n][u].fragments[f];
          const Fragment<float> numbers = Fragment<float>(float(pair.x), float(pair.y));
          UNROLL
          for (short r = 0; r < ROWS; r++) {
            block[r] =
                n == 0 ? numbers * unit_weights[n][r] : numbers * unit_weights[n][r] + block[r];
          }
        }
        UNROLL
        for (short r = 0; r < ROWS; r++) {
          o.pairs[r][u][f] = o.pairs[r][u][f] * corrections[r] + block[r];
        }
      }
    }
  }
};

#endif
