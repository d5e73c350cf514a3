// The products of a block of keys on the matrix unit, and the loads of its rows (spans.h).
#pragma once

#include "decode_task.h"

// The SIMD group's part of one block of keys.
struct BlockKeys {
  int first;  // the first key
  // The lane's rows of k and v. Row indices after the last key load the last key again. Rows of
  // missing pages are read from page 0.
  typename Keys::Place k_places[KEY_FRAGMENTS];
  typename Values::Place v_places[KEY_FRAGMENTS];
  bool exist[KEY_FRAGMENTS];  // true for rows of v that exist
  int pages[KEY_FRAGMENTS];   // NO_PAGE if missing
  int rows[KEY_FRAGMENTS];    // INDICES
  // The units of v; with V_IN_K, all units of k.
  Unit<KvTileElement> v_units[KEY_FRAGMENTS][V_IN_K ? OWN_QK_SPANS : OWN_V_SPANS];
  // The codes and scales of the current span (V_SPAN_SCALES).
  uint2 v_codes[KEY_FRAGMENTS];
  float v_scales[KEY_FRAGMENTS];

  METAL_FUNC void begin(thread DecodeKv& kv, int kv_block) thread {
    first = kv_block;
    move_to(kv.keys, kv.values, first, BLOCK_K, kv.lane.index);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      const int first_row = first + j * FRAGMENT;
      const int row = kv.blocks.row(first_row + kv.lane.row);
      const int readable = kv.readable_row(row);
      // After the last key, the block table has no pages of this sequence.
      pages[j] = kv.keys.page_among(readable, kv.readable_row(first_row));
      k_places[j] = kv.keys.find_in(max(pages[j], 0), readable);
      v_places[j] = kv.values.find_in(max(pages[j], 0), readable);
      exist[j] = pages[j] >= 0 && kv.is_valid(row);
      if (INDICES) { rows[j] = row; }
    }
    if (ROW_SIMDGROUPS > 1) { share_units(kv); }
  }

  // The listed keys of the lane's columns in fragment j of a tile of scores.
  METAL_FUNC vec<int, 2> column_rows(short j, ushort lane_index) const thread {
    return column_numbers(rows[j], lane_index);
  }

  // SIMD groups with different rows need the same keys and values. Each SIMD group loads a part of
  // a block's units for all of them. An example with three SIMD groups:
  //
  //   unit of keys    0 1 2 3 4 5 6 ..     unit of values  0 1 2 3 4 5 6 ..
  //   loaded by       0 1 2 0 1 2 0 ..     loaded by       1 2 0 1 2 0 1 ..
  //
  // The second SIMD group loads the first unit of values, so that the first SIMD group does not
  // load one unit more of both. `transpose_scores` has the barrier after the values.
  METAL_FUNC void share_units(thread const DecodeKv& kv) const thread {
    Unit<KvTileElement> unit;
    UNROLL
    for (short n = 0; n < KEY_FRAGMENTS * OWN_QK_SPANS; n++) {
      const short j = n / OWN_QK_SPANS;
      const short s = n % OWN_QK_SPANS;
      if (n % ROW_SIMDGROUPS == kv.lane.row_simdgroup && span_exists(kv.lane.span(s), QK_SPANS)) {
        load_key(unit, j, s, kv);
        unit.store(kv.key_unit(j, s));
        if (K_SPAN_SCALES) {
          *kv.scale_of(kv.key_unit(j, s)) = kv.keys.span_scale(k_places[j], kv.lane.span(s));
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (short n = 0; n < KEY_FRAGMENTS * OWN_V_SPANS; n++) {
      const short j = n / OWN_V_SPANS;
      const short s = n % OWN_V_SPANS;
      if ((n + 1) % ROW_SIMDGROUPS == kv.lane.row_simdgroup &&
          span_exists(kv.lane.span(s), V_SPANS)) {
        if (V_SPAN_SCALES) {
          unit.expand_codes<V_FORMAT>(kv.values.codes(v_places[j], kv.column(s)));
          *kv.scale_of(kv.value_unit(j, s)) = value_scale(j, s, kv);
        } else {
          unit.load<HEAD_DIM_V>(kv.values, v_places[j], kv.column(s), exist[j]);
        }
        unit.store(kv.value_unit(j, s));
      }
    }
  }

  // The lane's unit of key fragment j and the SIMD group's s-th span, without its scale.
  METAL_FUNC void load_key(thread Unit<KvTileElement>& unit, short j, short s,
                           thread const DecodeKv& kv) const thread {
    if (K_SPAN_SCALES) {
      unit.expand_codes<KV_FORMAT>(kv.keys.codes(k_places[j], kv.column(s)));
    } else {
      unit.load<HEAD_DIM_QK>(kv.keys, k_places[j], kv.column(s), !V_IN_K || exist[j]);
    }
  }

  // products = k q^T of the SIMD group's columns.
  METAL_FUNC void multiply_keys(thread ProductTile& products, thread const QueryTile& q_tile,
                                thread const DecodeKv& kv) thread {
    products.fill(0.0f);
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      UNROLL
      for (short begin = 0; begin < OWN_QK_SPANS; begin += CHAIN_SPANS) {
        multiply_chain(products.fragments[j], j, begin, q_tile, kv);
      }
      UNROLL
      for (short i = 0; PAGED && i < ROW_FRAGMENTS; i++) {
        thread Fragment<float>& product = products.fragments[j][i];
        product = pages[j] >= 0 ? product : Fragment<float>(NAN, NAN);
      }
    }
  }

  // Adds the products of key fragment j over a chain of the SIMD group's spans, from `begin` on.
  METAL_FUNC void multiply_chain(thread Fragment<float>* products, short j, short begin,
                                 thread const QueryTile& q_tile, thread const DecodeKv& kv) thread {
    const short end = min(OWN_QK_SPANS, begin + CHAIN_SPANS);
    Unit<KvTileElement> units[CHAIN_SPANS];
    UNROLL
    for (short s = begin; s < end; s++) {
      if (!span_exists(kv.lane.span(s), QK_SPANS)) { continue; }
      if (ROW_SIMDGROUPS > 1) {
        units[s - begin].load(kv.key_unit(j, s));
      } else {
        load_key(units[s - begin], j, s, kv);
      }
    }
    RegisterTile<float, 1, ROW_FRAGMENTS> chain;
    chain.fill(0.0f);
    UNROLL
    for (short s = begin; s < end; s++) {
      if (span_exists(kv.lane.span(s), QK_SPANS)) {
        if (V_IN_K) { v_units[j][s] = units[s - begin]; }
        multiply_unit(chain, units[s - begin], q_tile, s);
      }
    }
    if (K_SPAN_SCALES && ROW_SIMDGROUPS == 1) {
      chain.scale(kv.keys.span_scale(k_places[j], min(kv.lane.span(begin), QK_SPANS - 1)));
    } else if (K_SPAN_SCALES && span_exists(kv.lane.span(begin), QK_SPANS)) {
      chain.scale(*kv.scale_of(kv.key_unit(j, begin)));
    }
    UNROLL
    for (short i = 0; i < ROW_FRAGMENTS; i++) { products[i] += chain.fragments[0][i]; }
  }

  // chain += unit q^T, for the SIMD group's s-th span.
  METAL_FUNC static void multiply_unit(thread RegisterTile<float, 1, ROW_FRAGMENTS>& chain,
                                       thread const Unit<KvTileElement>& unit,
                                       thread const QueryTile& q_tile, short s) {
    UNROLL
    for (short f = 0; f < SPAN_FRAGMENTS; f++) {
      // Published kernels that mix float with half or bfloat have float on the left only.
      const Fragment<ELEMENT> key_fragment =
          Fragment<ELEMENT>(ELEMENT(unit.fragments[f].x), ELEMENT(unit.fragments[f].y));
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) {
        mma<ELEMENT, ELEMENT>(chain.fragments[0][i], key_fragment,
                              q_tile.fragments[s * SPAN_FRAGMENTS + f][i]);
      }
    }
  }

  // Loads the values of the SIMD group's s-th span; with V_IN_K, loads only their scales. Rows that
  // do not exist are zero: their weights are zero, and 0 * inf or 0 * NaN would be NaN.
  METAL_FUNC void load_values(short s, thread const DecodeKv& kv) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      if (ROW_SIMDGROUPS > 1) {
        v_units[j][s].load(kv.value_unit(j, s));
        if (V_SPAN_SCALES) { v_scales[j] = *kv.scale_of(kv.value_unit(j, s)); }
        continue;
      }
      if (V_SPAN_SCALES) { v_scales[j] = value_scale(j, s, kv); }
      if (V_SPAN_SCALES && !V_IN_K) {
        v_codes[j] = kv.values.codes(v_places[j], kv.column(s));
      } else if (!V_IN_K) {
        v_units[j][s].load<HEAD_DIM_V>(kv.values, v_places[j], kv.column(s), exist[j]);
      }
    }
  }

  METAL_FUNC float value_scale(short j, short s, thread const DecodeKv& kv) const thread {
    const float scale = kv.values.span_scale(v_places[j], kv.lane.span(s));
    return exist[j] ? scale : 0.0f;
  }

  // Converts the codes of the s-th span to ELEMENT, and multiplies weights by the scales. A lane
  // has the scale of its row, and needs the scales of the keys in its two columns.
  METAL_FUNC void scale_span(thread ScoreRow* span_weights, short s, ushort lane_index) thread {
    UNROLL
    for (short j = 0; j < KEY_FRAGMENTS; j++) {
      if (!V_IN_K && ROW_SIMDGROUPS == 1) { v_units[j][s].expand_codes<V_FORMAT>(v_codes[j]); }
      const Fragment<float> scales = column_numbers(v_scales[j], lane_index);
      UNROLL
      for (short i = 0; i < ROW_FRAGMENTS; i++) { span_weights[i].fragments[0][j] *= scales; }
    }
  }
};
