// A block of keys and values, multiplied by the matrix unit. Lanes load K and V straight into
// fragments (spans.h).
#pragma once

#include "decode_tile.h"

// The SIMD group's part of the products of one block of keys.
struct BlockKeys {
  // The lane's rows of k and v: past the last they repeat it, and those of missing pages lie in the
  // first page.
  typename Keys::Place k_places[KEY_FRAGMENTS];
  typename Values::Place v_places[KEY_FRAGMENTS];
  bool exist[KEY_FRAGMENTS];  // values
  int pages[KEY_FRAGMENTS];
  int rows[KEY_FRAGMENTS];  // INDICES
  // With V_IN_K a unit of k is kept, whether or not it is of v's columns too.
  Unit<KvTileElement> v_units[KEY_FRAGMENTS][V_IN_K ? OWN_QK_SPANS : OWN_V_SPANS];
  // With V_SPAN_SCALES, of the span at hand.
  uint2 v_codes[KEY_FRAGMENTS];
  float v_scales[KEY_FRAGMENTS];

  METAL_FUNC void reset(thread const Keys& keys, thread const Values& values,
                        thread const DecodeBlocks& blocks, int kv_block, int own_row,
                        thread const Sequence& sequence) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const int first = kv_block + j * FRAGMENT;
      const int row = blocks.row(first + own_row);
      const int readable = readable_row(row, sequence);
      // Past the last key no page of the sequence is listed.
      pages[j] = keys.page_among(readable, readable_row(first, sequence));
      k_places[j] = keys.find_in(max(pages[j], 0), readable);
      v_places[j] = values.find_in(max(pages[j], 0), readable);
      exist[j] = pages[j] >= 0 && row >= sequence.first_key && row < sequence.kv_length;
      if (INDICES) {
        rows[j] = row;
      }
    }
  }

  // Of the lane's columns of a tile of scores, the keys' rows in fragment j.
  METAL_FUNC vec<int, 2> column_rows(short j, ushort lane) const thread {
    return of_columns(rows[j], lane);
  }

  // Reads the values of span `span`, the SIMD group's s-th, or with V_IN_K only their scales. Rows
  // that do not exist are zero: their weight is zero, and 0 * inf or 0 * NaN would be NaN.
  METAL_FUNC void load_values(short s, int span, thread const Values& values,
                              threadgroup Fragment<KvTileElement>* pairs,
                              thread const DecodeLane& own) thread {
    const int column = span * SPAN_COLUMNS + own.unit_column;
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      if (ROW_SIMDGROUPS > 1) {
        v_units[j][s].load(value_unit(pairs, j, s, own));
        if (V_SPAN_SCALES) {
          v_scales[j] = *scale_of(value_unit(pairs, j, s, own));
        }
        continue;
      }
      if (V_SPAN_SCALES) {
        v_scales[j] = value_scale(j, span, values);
      }
      if (V_SPAN_SCALES && !V_IN_K) {
        v_codes[j] = values.codes(v_places[j], column);
      } else if (!V_IN_K) {
        v_units[j][s].load<HEAD_DIM_V>(values, v_places[j], column, exist[j]);
      }
    }
  }

  METAL_FUNC float value_scale(short j, int span, thread const Values& values) const thread {
    const float scale = values.span_scale(v_places[j], span);
    return exist[j] ? scale : 0.0f;
  }

  // Makes ELEMENT of the codes of the s-th span, and scales the weights that they meet: a lane has
  // the scales of its own row, and needs those of the keys of its two columns.
  METAL_FUNC void scale_span(thread ScoreRow* span_weights, short s, ushort lane) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      if (!V_IN_K && ROW_SIMDGROUPS == 1) {
        v_units[j][s].expand_codes<V_FORMAT>(v_codes[j]);
      }
      const Fragment<float> scales = of_columns(v_scales[j], lane);
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        span_weights[i].fragments[0][j] *= scales;
      }
    }
  }

  // Of SIMD groups with other rows, each loads some of the keys that all of them need, and then of
  // the values, which `transpose_scores` orders before they are read. `pairs`: [COLUMN_SIMDGROUPS,
  // KEY_FRAGMENTS, OWN_QK_SPANS], then the same of OWN_V_SPANS, of UNIT_PAIRS.
  METAL_FUNC void share_units(threadgroup Fragment<KvTileElement>* pairs, thread const Keys& keys,
                              thread const Values& values,
                              thread const DecodeLane& own) const thread {
    Unit<KvTileElement> unit;
    UNROLL
    for (short n = 0; n < KEY_FRAGMENTS * OWN_QK_SPANS; n++) {
      const short s = n % OWN_QK_SPANS;
      if (n % ROW_SIMDGROUPS == own.row_simdgroup && span_exists(own.span(s), QK_SPANS)) {
        const short j = n / OWN_QK_SPANS;
        load_key(unit, j, keys, own.span(s) * SPAN_COLUMNS + own.unit_column);
        unit.store(key_unit(pairs, j, s, own));
        if (K_SPAN_SCALES) {
          *scale_of(key_unit(pairs, j, s, own)) = keys.span_scale(k_places[j], own.span(s));
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (short n = 0; n < KEY_FRAGMENTS * OWN_V_SPANS; n++) {
      const short s = n % OWN_V_SPANS;
      if ((n + 1) % ROW_SIMDGROUPS == own.row_simdgroup && span_exists(own.span(s), V_SPANS)) {
        const short j = n / OWN_V_SPANS;
        const int column = own.span(s) * SPAN_COLUMNS + own.unit_column;
        if (V_SPAN_SCALES) {
          unit.expand_codes<V_FORMAT>(values.codes(v_places[j], column));
          *scale_of(value_unit(pairs, j, s, own)) = value_scale(j, own.span(s), values);
        } else {
          unit.load<HEAD_DIM_V>(values, v_places[j], column, exist[j]);
        }
        unit.store(value_unit(pairs, j, s, own));
      }
    }
  }

  METAL_FUNC static threadgroup Fragment<KvTileElement>* key_unit(
      threadgroup Fragment<KvTileElement>* pairs, short j, short s, thread const DecodeLane& own) {
    return pairs + ((own.first_span * KEY_FRAGMENTS + j) * OWN_QK_SPANS + s) * UNIT_PAIRS +
           own.lane;
  }

  METAL_FUNC static threadgroup Fragment<KvTileElement>* value_unit(
      threadgroup Fragment<KvTileElement>* pairs, short j, short s, thread const DecodeLane& own) {
    return pairs + KEY_PAIRS +
           ((own.first_span * KEY_FRAGMENTS + j) * OWN_V_SPANS + s) * UNIT_PAIRS + own.lane;
  }

  // Where the lane's unit has the scale of its span.
  METAL_FUNC static threadgroup float* scale_of(threadgroup Fragment<KvTileElement>* unit) {
    return reinterpret_cast<threadgroup float*>(unit + SPAN_FRAGMENTS * SIMD_LANES);
  }

  // The lane's unit of key fragment j, unscaled.
  METAL_FUNC void load_key(thread Unit<KvTileElement>& unit, short j, thread const Keys& keys,
                           int column) const thread {
    if (K_SPAN_SCALES) {
      unit.expand_codes<KV_FORMAT>(keys.codes(k_places[j], column));
    } else {
      unit.load<HEAD_DIM_QK>(keys, k_places[j], column, !V_IN_K || exist[j]);
    }
  }

  // products = k q^T of the SIMD group's columns.
  METAL_FUNC void multiply(thread ProductTile& products, thread const QueryTile& q_tile,
                           thread const Keys& keys, threadgroup Fragment<KvTileElement>* pairs,
                           thread const DecodeLane& own) thread {
    products.fill(0.0f);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short first = 0; first < OWN_QK_SPANS; first += CHAIN_SPANS) {
        const short end = min(OWN_QK_SPANS, first + CHAIN_SPANS);
        Unit<KvTileElement> units[CHAIN_SPANS];
        UNROLL
        for (short s = first; s < end; s++) {
          if (!span_exists(own.span(s), QK_SPANS)) {
            continue;
          }
          if (ROW_SIMDGROUPS > 1) {
            units[s - first].load(key_unit(pairs, j, s, own));
          } else {
            load_key(units[s - first], j, keys, own.span(s) * SPAN_COLUMNS + own.unit_column);
          }
        }
        RegisterTile<float, 1, ROW_FRAGMENTS> chain;
        chain.fill(0.0f);
        UNROLL
        for (short s = first; s < end; s++) {
          if (span_exists(own.span(s), QK_SPANS)) {
            if (V_IN_K) {
              v_units[j][s] = units[s - first];
            }
            multiply_unit(chain, units[s - first], q_tile, s);
          }
        }
        if (K_SPAN_SCALES && ROW_SIMDGROUPS == 1) {
          chain.scale(keys.span_scale(k_places[j], min(own.span(first), QK_SPANS - 1)));
        } else if (K_SPAN_SCALES && span_exists(own.span(first), QK_SPANS)) {
          chain.scale(*scale_of(key_unit(pairs, j, first, own)));
        }
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          products.fragments[j][i] += chain.fragments[0][i];
        }
      }
      UNROLL
      for (short i = 0; PAGED && i < ROW_FRAGMENTS; i++) {
        thread Fragment<float>& product = products.fragments[j][i];
        product = pages[j] >= 0 ? product : Fragment<float>(NAN, NAN);
      }
    }
  }

  // chain += unit q^T, for the SIMD group's s-th span.
  METAL_FUNC static void multiply_unit(thread RegisterTile<float, 1, ROW_FRAGMENTS>& chain,
                                       thread const Unit<KvTileElement>& unit,
                                       thread const QueryTile& q_tile, short s) {
    UNROLL
    for (short f = 0; f < SPAN_FRAGMENTS; f++) {
      // Shipped kernels multiply float by half or bfloat with the float on the left only.
      const Fragment<ELEMENT> key_fragment =
          Fragment<ELEMENT>(ELEMENT(unit.fragments[f].x), ELEMENT(unit.fragments[f].y));
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        mma<ELEMENT, ELEMENT>(chain.fragments[0][i], key_fragment,
                              q_tile.fragments[s * SPAN_FRAGMENTS + f][i]);
      }
    }
  }
};

// The SIMD group's columns of out, [ROWS, Dv].
struct MatrixOut {
  OutTile tile;
  DecodeLane own;

  METAL_FUNC void reset(threadgroup float*, threadgroup float*,
                        thread const DecodeLane& lane) thread {
    own = lane;
    tile.fill(0.0f);
  }

  // out = out * corrections + weights v
  METAL_FUNC void accumulate(thread BlockKeys& block, thread const float* corrections,
                             thread const ScoreRow* weights, thread const Values& values,
                             threadgroup Fragment<KvTileElement>* pairs, thread const DecodeBlocks&,
                             int, thread const Sequence&) thread {
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      if (span_exists(own.span(s), V_SPANS)) {
        block.load_values(s, own.span(s), values, pairs, own);
        ScoreRow span_weights[ROW_FRAGMENTS];
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          span_weights[i] = weights[i];
        }
        if (V_SPAN_SCALES) {
          block.scale_span(span_weights, s, own.lane);
        }
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          UNROLL
          for (short i = 0; i < ROW_FRAGMENTS; i++) {
            Fragment<float> products = Fragment<float>(0.0f, 0.0f);
            UNROLL
            for (short j = 0; j < KEY_FRAGMENTS; j++) {
              mma<float, KvTileElement>(products, span_weights[i].fragments[0][j],
                                        block.v_units[j][s].fragments[f]);
            }
            thread Fragment<float>& sum = tile.fragments[i][s * SPAN_FRAGMENTS + f];
            sum = sum * corrections[i] + products;
          }
        }
      }
    }
  }

  // Row i times its share of the row's sum, or 0.
  METAL_FUNC void scale_row(short i, float share, bool sees_nothing) thread {
    UNROLL
    for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
      tile.fragments[i][d] =
          sees_nothing ? Fragment<float>(0.0f, 0.0f) : tile.fragments[i][d] * share;
    }
  }

  // Adds up the sums of SIMD groups with different keys, and stores the result.
  METAL_FUNC void write_rows(threadgroup Fragment<float>* sums, int first_row, int rows, int,
                             thread const TileRow* tile_rows, thread const SplitResult& result,
                             constant FlashDecodeParams& params) thread {
    sum_over_keys(sums);
    if (HADAMARD && own.key_simdgroup == 0) {
      multiply_by_hadamard(sums);
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      if (own.key_simdgroup == 0 && first_row + i * FRAGMENT + own.row < rows) {
        const int query = tile_rows[i].query;
        OutRow out_row;
        result.place(out_row, tile_rows[i].head, params);
        UNROLL
        for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
          const int span = own.span(d / SPAN_FRAGMENTS);
          if (span_exists(span, V_SPANS)) {
            if (KEY_SIMDGROUPS > 1 && !HADAMARD) {
              tile.fragments[i][d] += sums[sum_place(i, d)];
            }
            out_row.store(query,
                          span * SPAN_COLUMNS + own.unit_column + d % SPAN_FRAGMENTS * LANE_COLUMNS,
                          tile.fragments[i][d]);
          }
        }
      }
    }
  }

  // Each but the first leaves its sum with those of the SIMD groups after it.
  METAL_FUNC void sum_over_keys(threadgroup Fragment<float>* sums) thread {
    UNROLL
    for (short giver = KEY_SIMDGROUPS - 1; giver > 0; giver--) {
      if (own.simdgroup == giver) {
        UNROLL
        for (short i = 0; i < ROW_FRAGMENTS; i++) {
          UNROLL
          for (short d = 0; d < OWN_V_FRAGMENTS; d++) {
            if (giver < KEY_SIMDGROUPS - 1) {
              tile.fragments[i][d] += sums[sum_place(i, d)];
            }
            sums[sum_place(i, d)] = tile.fragments[i][d];
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // for the next one
    }
  }

  // The sums times the Hadamard matrix. `memory` has those of other keys, or is for spans of other
  // SIMD groups.
  METAL_FUNC void multiply_by_hadamard(threadgroup Fragment<float>* memory) thread {
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) {
      UNROLL
      for (short s = 0; s < OWN_V_SPANS; s++) {
        thread Fragment<float>* span = tile.fragments[i] + s * SPAN_FRAGMENTS;
        float values[UNIT_COLUMNS];
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          if (KEY_SIMDGROUPS > 1) {
            span[f] += memory[sum_place(i, s * SPAN_FRAGMENTS + f)];
          }
          values[2 * f] = span[f].x;
          values[2 * f + 1] = span[f].y;
        }
        hadamard_values<UNIT_COLUMNS>(values);
        hadamard_lanes<UNIT_COLUMNS>(values, own.lane, column_lane(2));
        hadamard_lanes<UNIT_COLUMNS>(values, own.lane, column_lane(4));
        UNROLL
        for (short f = 0; f < SPAN_FRAGMENTS; f++) {
          span[f] = Fragment<float>(values[2 * f], values[2 * f + 1]) * HADAMARD_SCALE;
        }
      }
      UNROLL
      for (short f = 0; HADAMARD_SPANS > 1 && f < SPAN_FRAGMENTS; f++) {
        join_spans(tile.fragments[i] + f, memory);
      }
    }
  }

  // Of one fragment of each span, sums and differences over the spans of a block.
  METAL_FUNC void join_spans(thread Fragment<float>* pairs,
                             threadgroup Fragment<float>* memory) const thread {
    Fragment<float> spans[COLUMN_SIMDGROUPS == 1 ? OWN_V_SPANS : 1];
    threadgroup Fragment<float>* rows = memory + own.row_simdgroup * V_SPANS * SIMD_LANES;
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      if (COLUMN_SIMDGROUPS == 1) {
        spans[COLUMN_SIMDGROUPS == 1 ? s : 0] = pairs[s * SPAN_FRAGMENTS];
      } else if (span_exists(own.span(s), V_SPANS)) {
        rows[own.span(s) * SIMD_LANES + own.lane] = pairs[s * SPAN_FRAGMENTS];
      }
    }
    if (COLUMN_SIMDGROUPS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (short s = 0; s < OWN_V_SPANS; s++) {
      const int span = own.span(s);
      const int first = span / max(HADAMARD_SPANS, 1) * HADAMARD_SPANS;
      Fragment<float> sum = Fragment<float>(0.0f, 0.0f);
      UNROLL
      for (short n = 0; n < HADAMARD_SPANS && span_exists(span, V_SPANS); n++) {
        const Fragment<float> pair =
            COLUMN_SIMDGROUPS == 1 ? spans[first + n] : rows[(first + n) * SIMD_LANES + own.lane];
        sum += pair * hadamard_sign(n, span - first);
      }
      pairs[s * SPAN_FRAGMENTS] = sum;
    }
    if (COLUMN_SIMDGROUPS > 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  METAL_FUNC int sum_place(short i, short d) const thread {
    return (i * OWN_V_FRAGMENTS + d) * SIMD_LANES + own.lane;
  }
};
