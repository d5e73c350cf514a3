// The product of weights and values without the matrix unit, for few rows of q. On the matrix unit
// most rows of a fragment would be empty.
//
// KEY_LANES lanes share a row of v. A lane has units of 8 columns that are KEY_LANES units apart,
// so that a SIMD group loads LOAD_KEYS whole rows at a time. A lane sums the products of its keys,
// for its columns of all rows of out. At the end, lanes add up their sums.
#pragma once

#include "decode_products.h"

// A lane's columns of out, [ROWS, Dv], with the interface of MatrixOut.
template <int LANES>
struct VectorOut {
  static constant constexpr int LOAD_KEYS = SIMD_LANES / LANES;
  static constant constexpr int LOADS = BLOCK_K / LOAD_KEYS;
  static constant constexpr int UNITS = V_PADDED / (UNIT_COLUMNS * LANES);
  // True if all units are inside the row.
  static constant constexpr bool WHOLE_UNITS = HEAD_DIM_V == V_PADDED;
  // The columns of a unit that a lane stores after lanes have added up their sums.
  static constant constexpr int OUT_COLUMNS = UNIT_COLUMNS / LOAD_KEYS;

  Fragment<float> pairs[ROWS][UNITS][SPAN_FRAGMENTS];
  Unit<KvTileElement> units[LOADS][UNITS];  // of the values of a block
  uint2 codes[LOADS][UNITS];                // V_SPAN_SCALES
  float scales[LOADS][UNITS];               // V_SPAN_SCALES
  threadgroup float* weights;               // [BLOCK_K + 1, ROWS]: corrections follow weights
  threadgroup float* shares;                // [ROWS], in the memory of the last block's scores
  threadgroup Fragment<float>* sums;        // [SIMDGROUPS, ROWS, V_PADDED]
  DecodeLane lane;

  METAL_FUNC void reset(thread const DecodeMemory& memory,
                        thread const DecodeLane& decode_lane) thread {
    lane = decode_lane;
    weights = memory.weights + lane.simdgroup * SIMDGROUP_WEIGHTS;
    shares = memory.scores + lane.simdgroup * SCORE_TILE;
    sums = memory.out;
    UNROLL
    for (short r = 0; r < ROWS; r++) {
      UNROLL
      for (short u = 0; u < UNITS; u++) {
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) { pairs[r][u][f] = Fragment<float>(0.0f, 0.0f); }
      }
    }
  }

  // The first column of the lane's unit u.
  METAL_FUNC int value_column(short u) const thread {
    return (u * LANES + lane.index % LANES) * UNIT_COLUMNS;
  }

  // Values that do not exist are zero: their weights are zero, and 0 * inf or 0 * NaN would be NaN.
  METAL_FUNC void load(thread const BlockKeys& block, thread const DecodeKv& kv) thread {
    UNROLL
    for (short n = 0; n < LOADS; n++) {
      const int key = kv.blocks.row(block.first + n * LOAD_KEYS + lane.index / LANES);
      const int readable = kv.readable_row(key);
      const int page = WHOLE_FRAGMENTS ? block.pages[n * LOAD_KEYS / FRAGMENT]
                                       : kv.values.page_among(readable, readable);
      const typename Values::Place place = kv.values.find_in(max(page, 0), readable);
      const bool exists = page >= 0 && kv.is_valid(key);
      UNROLL
      for (short u = 0; u < UNITS; u++) {
        const int column = value_column(u);
        if (V_SPAN_SCALES) {
          const bool inside = WHOLE_UNITS || column < HEAD_DIM_V;
          const float scale = inside ? kv.values.span_scale(place, column / SPAN_COLUMNS) : 0.0f;
          scales[n][u] = exists ? scale : 0.0f;
          codes[n][u] = inside ? kv.values.codes(place, column) : uint2(0);
        } else {
          units[n][u].template load<HEAD_DIM_V, WHOLE_UNITS>(kv.values, place, column, exists);
        }
      }
    }
  }

  // out = out * corrections + weights v
  METAL_FUNC void accumulate(thread const BlockKeys& block, thread const DecodeKv& kv,
                             thread const ScoreRow* scores,
                             thread const float* corrections) thread {
    if (lane.row < ROWS) {
      UNROLL
      for (short j = 0; j < KEY_FRAGMENTS; j++) {
        threadgroup float* place = weights + (j * FRAGMENT + lane.column) * ROWS + lane.row;
        place[0] = scores[0].fragments[0][j].x;
        place[ROWS] = scores[0].fragments[0][j].y;
      }
      if (lane.column == 0) { weights[BLOCK_K * ROWS + lane.row] = corrections[0]; }
    }
    load(block, kv);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    add_block();
  }

  METAL_FUNC void add_block() thread {
    float corrections[ROWS];
    UNROLL
    for (short r = 0; r < ROWS; r++) { corrections[r] = weights[BLOCK_K * ROWS + r]; }
    float key_weights[LOADS][ROWS];
    UNROLL
    for (short n = 0; n < LOADS; n++) {
      UNROLL
      for (short r = 0; r < ROWS; r++) {
        key_weights[n][r] = weights[(n * LOAD_KEYS + lane.index / LANES) * ROWS + r];
      }
    }
    UNROLL
    for (short u = 0; u < UNITS; u++) {
      float unit_weights[LOADS][ROWS];
      UNROLL
      for (short n = 0; n < LOADS; n++) {
        if (V_SPAN_SCALES) { units[n][u].template expand_codes<V_FORMAT>(codes[n][u]); }
        UNROLL
        for (short r = 0; r < ROWS; r++) {
          unit_weights[n][r] = V_SPAN_SCALES ? key_weights[n][r] * scales[n][u] : key_weights[n][r];
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
          pairs[r][u][f] = pairs[r][u][f] * corrections[r] + block[r];
        }
      }
    }
  }

  // A negative share marks a row that sees no key.
  METAL_FUNC void scale_row(short, float share, bool sees_nothing) thread {
    if (lane.column == 0 && lane.row < ROWS) { shares[lane.row] = sees_nothing ? -1.0f : share; }
  }

  // Multiplies row sums by shares, adds them up over lanes and SIMD groups, and stores the rows.
  METAL_FUNC void write(thread const TileResult& result,
                        constant FlashDecodeParams& params) const thread {
    constexpr int PAIRS = V_PADDED / LANE_COLUMNS;  // of a row
    constexpr int OWN_PAIRS = HADAMARD ? UNIT_COLUMNS / LANE_COLUMNS : 1;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    sum_lanes(reinterpret_cast<threadgroup float*>(sums) + lane.simdgroup * ROWS * V_PADDED);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // With HADAMARD all lanes take part, because they exchange sums.
    constexpr int END =
        HADAMARD ? (ROWS * PAIRS - 1) / (SIMD_LANES * OWN_PAIRS) * (SIMD_LANES * OWN_PAIRS) +
                       SIMD_LANES * OWN_PAIRS
                 : ROWS * PAIRS;
    const int thread_index = lane.simdgroup * SIMD_LANES + lane.index;
    for (int n = thread_index * OWN_PAIRS; n < END; n += THREADS * OWN_PAIRS) {
      const bool exists = result.has_row(n / PAIRS) && (!HADAMARD || n < ROWS * PAIRS);
      if (HADAMARD || exists) {
        const int place = HADAMARD ? min(n, ROWS * PAIRS - OWN_PAIRS) : n;
        Fragment<float> sum[OWN_PAIRS];
        UNROLL
        for (short i = 0; i < OWN_PAIRS; i++) {
          sum[i] = sums[place + i];
          UNROLL
          for (short part = 1; part < SIMDGROUPS; part++) {
            sum[i] += sums[part * ROWS * PAIRS + place + i];
          }
        }
        if (HADAMARD) { hadamard_unit(reinterpret_cast<thread float*>(sum), lane.index); }
        if (!exists) { continue; }
        TileRow row;
        row.reset(result.first_row + n / PAIRS, result.end, result.kv_head, params.problem);
        OutRow out_row;
        result.split.place(out_row, row.head, params);
        UNROLL
        for (short i = 0; i < OWN_PAIRS; i++) {
          out_row.store(row.query, (n + i) % PAIRS * LANE_COLUMNS, sum[i]);
        }
      }
    }
  }

  METAL_FUNC void sum_lanes(threadgroup float* rows) const thread {
    UNROLL
    for (short r = 0; r < ROWS; r++) {
      const float share = shares[r];
      UNROLL
      for (short u = 0; u < UNITS; u++) {
        float sums[UNIT_COLUMNS];
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          sums[2 * f] = pairs[r][u][f].x;
          sums[2 * f + 1] = pairs[r][u][f].y;
        }
        // In each step two lanes exchange sums, and each keeps half of the columns.
        short count = UNIT_COLUMNS;
        short first = 0;
        UNROLL
        for (ushort bit = LANES; bit < SIMD_LANES; bit *= 2) {
          count /= 2;
          const bool upper = (lane.index & bit) != 0;
          first += upper ? count : short(0);
          UNROLL
          for (short n = 0; n < count; n++) {
            const float passed = upper ? sums[n] : sums[n + count];
            const float kept = upper ? sums[n + count] : sums[n];
            sums[n] = kept + simd_shuffle_xor(passed, bit);
          }
        }
        threadgroup float* place = rows + r * V_PADDED + value_column(u) + first;
        UNROLL
        for (short n = 0; n < OUT_COLUMNS; n++) {
          place[n] = share < 0.0f ? 0.0f : sums[n] * share;
        }
      }
    }
  }
};
