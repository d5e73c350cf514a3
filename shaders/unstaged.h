// Products with keys and values that lanes read from device memory without staging.
//
// A lane has one row of a transposed fragment of K, that is one column of two keys. Fragments take
// their columns from 8 chunks of 16 bytes: a lane loads chunk number `row` of two keys, and row r
// of fragment d is column d of chunk r. Q has the same order of columns. V is read as in spans.h.
#pragma once

#include "spans.h"
#include "staged.h"

constant constexpr int KEY_CHUNK = chunk_elements<KvTileElement>();
constant constexpr int KEY_SPAN = FRAGMENT * KEY_CHUNK;

static_assert(KV_STAGED || (COLUMN_SIMDGROUPS == 1 && HEAD_DIM_QK % KEY_SPAN == 0 &&
                            V_SLICE % SPAN_COLUMNS == 0),
              "without staging, a SIMD group reads whole spans of all columns");

// The zipped chunks of two keys: fragment d has element d of both keys.
template <typename T>
struct ChunkPair {
  uint4 low;
  uint4 high;

  METAL_FUNC void zip(uint4 first, uint4 second) thread { zip_pairs<T>(first, second, low, high); }

  METAL_FUNC Fragment<T> fragment_at(short d) const thread {
    constexpr short HALF = chunk_elements<T>() / 2;
    return chunk_pair<T>(d < HALF ? low : high, d % HALF);
  }
};

// A SIMD group's rows of q, [ROWS * 8, D], in registers, with columns in K's order.
template <typename T, typename Source, int ROWS, int COLUMNS>
struct SpanOperandTile {
  RegisterTile<T, ROWS, COLUMNS / FRAGMENT> held;

  METAL_FUNC void load(Source source, int row, int last_row, int column) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      const int position = existing_row(row, i, last_row);
      UNROLL
      for (short n = 0; n < COLUMNS / FRAGMENT; n++) {
        const int first = n / KEY_CHUNK * KEY_SPAN + column * KEY_CHUNK + n % KEY_CHUNK;
        held.fragments[i][n] = Fragment<T>(source.element(position, first),
                                           source.element(position, first + KEY_CHUNK));
      }
    }
  }
};

// Has the interface of StagedKv. Each SIMD group reads K and V for itself.
template <int ROWS, int KEYS>
struct DirectKv {
  using QueryTile = SpanOperandTile<ELEMENT, Queries, ROWS, QK_COLUMNS>;
  using Scores = RegisterTile<float, ROWS, KEYS>;
  using Softmax = RowsSoftmax<ROWS>;
  using Out = RegisterTile<float, ROWS, OWN_V_FRAGMENTS>;
  static constant constexpr int OUT_FRAGMENTS = OWN_V_FRAGMENTS;
  Keys keys;
  Values values;
  Sequence sequence;
  int first_key;
  int first_value_column;
  ushort row;
  ushort column;
  ushort lane;

  METAL_FUNC void reset(threadgroup uint4*, threadgroup Fragment<float>*, Keys all_keys,
                        Values all_values, thread const Sequence& own_sequence, int slice, ushort,
                        ushort, ushort own_lane) thread {
    keys = all_keys;
    values = all_values;
    sequence = own_sequence;
    first_value_column = slice * V_SLICE;
    lane = own_lane;
    row = fragment_row(lane);
    column = fragment_column(lane);
  }

  METAL_FUNC int query_column() const thread { return 0; }

  METAL_FUNC int out_column(short d) const thread {
    return first_unit_column(column) + span_offset(d);
  }

  METAL_FUNC void begin_block(int kv_block) thread {
    first_key = kv_block;
    move_to(keys, values, first_key, BLOCK_K, lane);
  }

  // Key indices after the last key load the last key again.
  METAL_FUNC void multiply_keys(thread Scores& scores, thread const QueryTile& q,
                                bool seen) const thread {
    constexpr short SPANS = HEAD_DIM_QK / KEY_SPAN;
    constexpr short CHAIN = CHAIN_COLUMNS / KEY_SPAN;
    if (!seen) { return; }
    scores.fill(0.0f);
    UNROLL
    for (short j = 0; j < KEYS; j++) {
      const int key = first_key + j * FRAGMENT + column;
      const typename Keys::Place even = keys.find(min(key, sequence.kv_length - 1));
      const typename Keys::Place odd = keys.find(min(key + 1, sequence.kv_length - 1));
      UNROLL
      for (short begin = 0; begin < SPANS; begin += CHAIN) {
        RegisterTile<float, ROWS, 1> chain;
        chain.fill(0.0f);
        UNROLL
        for (short s = begin; s < min(SPANS, short(begin + CHAIN)); s++) {
          const int key_column = s * KEY_SPAN + row * KEY_CHUNK;
          ChunkPair<KvTileElement> pair;
          pair.zip(keys.chunk(even, key_column), keys.chunk(odd, key_column));
          UNROLL
          for (short d = 0; d < KEY_CHUNK; d++) {
            UNROLL
            for (short i = 0; i < ROWS; i++) {
              mma<ELEMENT, KvTileElement>(chain.fragments[i][0],
                                          q.held.fragments[i][s * KEY_CHUNK + d],
                                          pair.fragment_at(d));
            }
          }
        }
        UNROLL
        for (short i = 0; i < ROWS; i++) { scores.fragments[i][j] += chain.fragments[i][0]; }
      }
    }
  }

  // As in products.h, a block's products are summed separately first.
  METAL_FUNC void accumulate_values(thread Out& o, thread const float* corrections,
                                    thread const Scores& weights) const thread {
    constexpr bool WHOLE = HEAD_DIM_V % V_SLICE == 0;  // the last slice ends at the row's end
    typename Values::Place places[KEYS];
    bool exist[KEYS];
    UNROLL
    for (short j = 0; j < KEYS; j++) {
      const int key = first_key + j * FRAGMENT + row;
      places[j] = values.find(min(key, sequence.kv_length - 1));
      exist[j] = key >= sequence.first_key && key < sequence.kv_length;
    }
    UNROLL
    for (short s = 0; s < V_SLICE / SPAN_COLUMNS; s++) {
      const int first = first_value_column + first_unit_column(column) + s * SPAN_COLUMNS;
      RegisterTile<float, ROWS, SPAN_FRAGMENTS> block;
      block.fill(0.0f);
      UNROLL
      for (short j = 0; j < KEYS; j++) {
        Unit<KvTileElement> unit;
        unit.template load<HEAD_DIM_V, WHOLE>(values, places[j], first, exist[j]);
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          UNROLL
          for (short i = 0; i < ROWS; i++) {
            mma<float, KvTileElement>(block.fragments[i][f], weights.fragments[i][j],
                                      unit.fragments[f]);
          }
        }
      }
      UNROLL
      for (short i = 0; i < ROWS; i++) {
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          thread Fragment<float>& part = o.fragments[i][s * SPAN_FRAGMENTS + f];
          part = part * corrections[i] + block.fragments[i][f];
        }
      }
    }
  }
};
