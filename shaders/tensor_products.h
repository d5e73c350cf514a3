// Products of tensor tiles with rows that are read from device memory, 32 at a time.
#pragma once

#include "parts.h"
#include "softmax.h"
#include "spans.h"
#include "tensor_tile.h"

// A lane has 4 of 32 keys. They are renamed like columns in tensor_tile.h: the lane's key 2 h + i
// is row 16 h + r + 8 i of a transposed right operand, or row r + 8 i of half h's right operand.
constant constexpr int LANE_KEYS = 4;

METAL_FUNC ushort lane_key(ushort row, short key) {
  return (row & 4) * 2 + (row & 3) + key / 2 * 4 + key % 2 * 16;
}

// The places in K or V of a lane's keys of a block, or the places in Q or dout of its queries. A
// key outside [begin, end) has the place of the nearest key inside.
template <typename Source>
struct KeyPlaces {
  typename Source::Place places[LANE_KEYS];
  bool exist[LANE_KEYS];

  // All lanes call it, because source.find may shuffle.
  METAL_FUNC void find(thread const Source& source, int block, int begin, int end,
                       ushort row) thread {
    UNROLL
    for (short i = 0; i < LANE_KEYS; i++) {
      const int key = block + lane_key(row, i);
      places[i] = source.find(clamp(key, begin, end - 1));
      exist[i] = key >= begin && key < end;
    }
  }
};

// A lane's unit of a row; float32 is rounded to the 11 bits that products keep.
template <typename T, int COLUMNS, bool WHOLE, typename Source>
METAL_FUNC Unit<T> operand_unit(thread const Source& source,
                                thread const typename Source::Place& place, int column,
                                bool exists) {
  Unit<T> unit;
  unit.template load<COLUMNS, WHOLE>(source, place, column, exists);
  UNROLL
  for (short j = 0; j < SPAN_FRAGMENTS; j++) {
    unit.fragments[j] = rounded_operand(unit.fragments[j]);
  }
  return unit;
}

// The number of spans of a row of `columns` columns that a SIMD group has if others share the row.
constexpr int own_spans(int columns) {
  return (spans(columns) + COLUMN_SIMDGROUPS - 1) / COLUMN_SIMDGROUPS;
}

// True if all units of these spans begin inside the row.
constexpr bool whole_spans(int columns) {
  return columns == COLUMN_SIMDGROUPS * own_spans(columns) * SPAN_COLUMNS;
}

// The SIMD group's spans of its rows of q, or of k in the backward, as the left factor of products.
// They are in registers if HELD, and otherwise read again for each block.
template <typename T, typename Source, int COLUMNS, bool HELD>
struct QueryRows {
  using Element = T;
  Source source;
  int positions[TENSOR_ROWS];  // of the lane's rows
  int lane_column;
  RegisterTile<T, TENSOR_ROWS, HELD ? own_spans(COLUMNS) * SPAN_FRAGMENTS : 1> held;

  // Row indices after last_row load that row again; their results are not stored.
  METAL_FUNC void load(Source rows, int row, int last_row, int column) thread {
    source = rows;
    lane_column = column;
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      positions[i] = min(row + i * FRAGMENT, last_row);
      UNROLL
      for (short span = 0; HELD && span < own_spans(COLUMNS); span++) {
        const Unit<T> unit = read(i, span);
        UNROLL
        for (short j = 0; j < SPAN_FRAGMENTS; j++) {
          held.fragments[i][HELD ? span * SPAN_FRAGMENTS + j : 0] = unit.fragments[j];
        }
      }
    }
  }

  METAL_FUNC Unit<T> read(short i, short span) const thread {
    const typename Source::Place place = source.find(positions[i]);
    return operand_unit<T, COLUMNS, whole_spans(COLUMNS)>(source, place,
                                                          span * SPAN_COLUMNS + lane_column, true);
  }

  // [16, 32]
  METAL_FUNC RegisterTile<T, TENSOR_ROWS, SPAN_FRAGMENTS> tile(short span) const thread {
    RegisterTile<T, TENSOR_ROWS, SPAN_FRAGMENTS> result;
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      Unit<T> unit;
      if (!HELD) { unit = read(i, span); }
      UNROLL
      for (short j = 0; j < SPAN_FRAGMENTS; j++) {
        result.fragments[i][j] =
            HELD ? held.fragments[i][HELD ? span * SPAN_FRAGMENTS + j : 0] : unit.fragments[j];
      }
    }
    return result;
  }
};

using BlockTile = RegisterTile<float, TENSOR_ROWS, SPAN_FRAGMENTS>;

// 1 + 2^-11. After multiplication by this factor, cut() returns numbers of 11 bits unchanged, and
// rounds other numbers up or down, by at most 2^-11 of their value.
constant constexpr float CUT_CENTRE = 1.00048828125f;

// Rounds float32 weights or gradients to the 11 bits that tensor operations keep: for 16-bit
// ELEMENT by the fewest instructions, and for float32 to the nearest, like other operands.
METAL_FUNC void round_to_cut(thread BlockTile& tile) {
  constexpr bool NEAREST = sizeof(ELEMENT) == sizeof(float);
  UNROLL
  for (short i = 0; i < TENSOR_ROWS; i++) {
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) {
      const Fragment<float> x = tile.fragments[i][j];
      tile.fragments[i][j] = NEAREST ? rounded_operand(x) : cut(x * CUT_CENTRE);
    }
  }
}

// result += q k^T over the columns of spans [first, last). T: the type of the keys.
template <typename T, int COLUMNS, typename Query, typename Source>
METAL_FUNC void multiply_chain(thread BlockTile& result, thread const Query& q,
                               thread const Source& keys, thread const KeyPlaces<Source>& places,
                               short first, short last) {
  UNROLL
  for (short span = first; span < last; span++) {
    const RegisterTile<typename Query::Element, TENSOR_ROWS, SPAN_FRAGMENTS> rows =
        q.tile(span);          // [16, 32]
    Unit<T> units[LANE_KEYS];  // [32, 32]
    UNROLL
    for (short i = 0; i < LANE_KEYS; i++) {
      units[i] = operand_unit<T, COLUMNS, whole_spans(COLUMNS)>(
          keys, places.places[i], span * SPAN_COLUMNS + q.lane_column, true);
    }
    UNROLL
    for (short half_span = 0; half_span < 2; half_span++) {
      TensorRight<T> right;  // [32, 16]
      UNROLL
      for (short s = 0; s < LANE_KEYS * TENSOR_HALF; s++) {
        right.fragments[s] =
            units[s / TENSOR_HALF].fragments[TENSOR_HALF * half_span + s % TENSOR_HALF];
      }
      const auto left = tensor_left(rows, half_span);  // [16, 16]
      tensor_mma<true>(result, left, right);
    }
  }
}

// result = q k^T, [16, 32], over the SIMD group's spans of the COLUMNS columns.
template <typename T, int COLUMNS, typename Query, typename Source>
METAL_FUNC void multiply_transposed(thread BlockTile& result, thread const Query& q,
                                    thread const Source& keys,
                                    thread const KeyPlaces<Source>& places) {
  constexpr short SPANS = own_spans(COLUMNS);
  constexpr short CHAIN = CHAIN_COLUMNS / SPAN_COLUMNS;
  result.fill(0.0f);
  multiply_chain<T, COLUMNS>(result, q, keys, places, 0, SPANS < CHAIN ? SPANS : CHAIN);
  UNROLL
  for (short first = CHAIN; first < SPANS; first += CHAIN) {
    BlockTile chain;
    chain.fill(0.0f);
    multiply_chain<T, COLUMNS>(chain, q, keys, places, first, min(SPANS, short(first + CHAIN)));
    result.add(chain);
  }
}

// sum = sum * corrections + weights values, for columns [first_column, first_column + SLICE) of
// COLUMNS; all slices of the grid have GRID_COLUMNS. As in products.h, a block's products are
// summed separately first.
template <typename T, int COLUMNS, int SLICE,
          int GRID_COLUMNS = (COLUMNS + SLICE - 1) / SLICE * SLICE, typename Source>
METAL_FUNC void accumulate(thread RegisterTile<float, TENSOR_ROWS, SLICE / FRAGMENT>& sum,
                           thread const float* corrections, thread const BlockTile& weights,
                           thread const Source& values, thread const KeyPlaces<Source>& places,
                           int first_column, int lane_column) {
  UNROLL
  for (short span = 0; span < SLICE / SPAN_COLUMNS; span++) {
    const int column = first_column + span * SPAN_COLUMNS;
    // The last slice may extend past the end of a row by more than a span.
    const bool exists = COLUMNS == GRID_COLUMNS || column < COLUMNS;
    Unit<T> units[LANE_KEYS];  // [32, 32]
    UNROLL
    for (short i = 0; i < LANE_KEYS; i++) {
      units[i].fill(T(0));
      if (exists) {
        units[i] = operand_unit<T, COLUMNS, COLUMNS % SPAN_COLUMNS == 0>(
            values, places.places[i], column + lane_column, places.exist[i]);
      }
    }
    BlockTile block;  // [16, 32]
    block.fill(0.0f);
    UNROLL
    for (short half_span = 0; half_span < 2; half_span++) {
      TensorRight<T> right;  // [16, 32]
      UNROLL
      for (short s = 0; s < 2 * SPAN_FRAGMENTS; s++) {
        right.fragments[s] = units[2 * half_span + s / TENSOR_HALF % 2]
                                 .fragments[s / SPAN_FRAGMENTS * TENSOR_HALF + s % TENSOR_HALF];
      }
      const auto left = tensor_left(weights, half_span);  // [16, 16]
      tensor_mma<false>(block, left, right);
    }
    UNROLL
    for (short i = 0; i < TENSOR_ROWS; i++) {
      UNROLL
      for (short j = 0; j < SPAN_FRAGMENTS; j++) {
        thread Fragment<float>& total = sum.fragments[i][span * SPAN_FRAGMENTS + j];
        total = total * corrections[i] + block.fragments[i][j];
      }
    }
  }
}

// sum += weights values.
template <typename T, int COLUMNS, int SLICE, int GRID_COLUMNS, typename Source>
METAL_FUNC void accumulate(thread RegisterTile<float, TENSOR_ROWS, SLICE / FRAGMENT>& sum,
                           thread const BlockTile& weights, thread const Source& values,
                           thread const KeyPlaces<Source>& places, int first_column,
                           int lane_column) {
  const float corrections[TENSOR_ROWS] = {1.0f, 1.0f};
  accumulate<T, COLUMNS, SLICE, GRID_COLUMNS>(sum, corrections, weights, values, places,
                                              first_column, lane_column);
}

// Row sums of the cut weights. The output is divided by these sums, so that the mean error of the
// cut cancels. The log-sum-exp uses the sums of the weights before the cut.
struct CutWeights {
  float lane_sum;

  METAL_FUNC void reset() thread { lane_sum = 0.0f; }

  // Cuts a row's weights of a block. correction: from OnlineSoftmax::update.
  METAL_FUNC void update(thread Fragment<float>* weights, float correction) thread {
    lane_sum *= correction;
    UNROLL
    for (short j = 0; j < SPAN_FRAGMENTS; j++) {
      weights[j] = cut(weights[j]);
      lane_sum += weights[j].x + weights[j].y;
    }
  }

  METAL_FUNC float row_sum(float) const thread { return fragment_row_sum(lane_sum); }
};
