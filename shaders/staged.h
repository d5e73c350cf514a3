// Keys and values of a block, staged in threadgroup memory for all SIMD groups.
//
// If one SIMD group has too few registers, two SIMD groups share the rows (COLUMN_SIMDGROUPS). Each
// has half of the columns of q, k, v and out, and they add up their parts of the scores.
#pragma once

#include "forward.h"
#include "products.h"

#ifndef KV_STAGED
#define KV_STAGED 1
#endif

constant constexpr int QK_FRAGMENTS = fragments(HEAD_DIM_QK);
constant constexpr int QK_COLUMNS = QK_FRAGMENTS * FRAGMENT;
constant constexpr int KEY_FRAGMENTS = BLOCK_K / FRAGMENT;
// A SIMD group's share of the columns.
constant constexpr int OWN_QK_FRAGMENTS = QK_FRAGMENTS / COLUMN_SIMDGROUPS;
constant constexpr int OWN_V_FRAGMENTS = V_SLICE / FRAGMENT / COLUMN_SIMDGROUPS;
constant constexpr int K_TILE_BYTES = BLOCK_K * padded(QK_COLUMNS) * sizeof(KvTileElement);
constant constexpr int V_TILE_BYTES = BLOCK_K * padded(V_SLICE) * sizeof(KvTileElement);
// SIMD groups that share rows stage V in the memory of K's tile.
constant constexpr int V_TILE_BEGIN = COLUMNS_SPLIT ? 0 : K_TILE_BYTES;
constant constexpr int TILE_BYTES =
    V_TILE_BEGIN + V_TILE_BYTES > K_TILE_BYTES ? V_TILE_BEGIN + V_TILE_BYTES : K_TILE_BYTES;

static_assert(V_SLICE % FRAGMENT == 0, "a slice of V is a multiple of 8 columns");
static_assert(BLOCK_K % FRAGMENT == 0, "BLOCK_K is a multiple of 8");
static_assert(!KV_STAGED || TILE_BYTES <= THREADGROUP_MEMORY_BYTES,
              "the K and V tiles fit in 32 KiB of threadgroup memory");

// The products of `attend` (forward.h) with one block of keys and values at a time.
template <int ROWS, int KEYS>
struct StagedKv {
  using Pair = Fragment<KvTileElement>;
  using QueryTile = OperandTile<ELEMENT, Queries, ROWS, OWN_QK_FRAGMENTS, Q_IN_REGISTERS>;
  using Scores = RegisterTile<float, ROWS, KEYS>;
  using Softmax = RowsSoftmax<ROWS>;
  using Out = RegisterTile<float, ROWS, OWN_V_FRAGMENTS>;
  static constant constexpr int OUT_FRAGMENTS = OWN_V_FRAGMENTS;
  Keys keys;
  Values values;
  Sequence sequence;
  int first_key;              // of the block
  int first_value_column;     // of the slice of v
  threadgroup uint4* k_tile;  // [BLOCK_K / 2, D] pairs
  threadgroup uint4* v_tile;  // [BLOCK_K, V_SLICE]
  threadgroup Fragment<float>* score_parts;
  const threadgroup Pair* k_lane;
  const threadgroup Pair* v_lane;
  ushort thread_index;
  ushort simdgroup;
  ushort lane;

  METAL_FUNC void reset(threadgroup uint4* tiles, threadgroup Fragment<float>* parts, Keys all_keys,
                        Values all_values, thread const Sequence& own_sequence, int slice,
                        ushort own_index, ushort own_simdgroup, ushort own_lane) thread {
    keys = all_keys;
    values = all_values;
    sequence = own_sequence;
    first_value_column = slice * V_SLICE;
    k_tile = tiles;
    v_tile = tiles + V_TILE_BEGIN / sizeof(uint4);
    score_parts = parts;
    thread_index = own_index;
    simdgroup = own_simdgroup;
    lane = own_lane;
    const ushort row = fragment_row(lane);
    const ushort column = fragment_column(lane);
    k_lane = lane_of_pairs<KvTileElement, QK_COLUMNS>(k_tile, row, column) + query_column();
    v_lane = lane_of_rows<KvTileElement, V_SLICE>(v_tile, row, column + value_column());
  }

  // The SIMD group's first column of q and k, and its first column of v and out in the slice.
  METAL_FUNC int query_column() const thread {
    return simdgroup % COLUMN_SIMDGROUPS * OWN_QK_FRAGMENTS * FRAGMENT;
  }

  METAL_FUNC int value_column() const thread {
    return simdgroup % COLUMN_SIMDGROUPS * OWN_V_FRAGMENTS * FRAGMENT;
  }

  // The lane's first column of its fragment d of out.
  METAL_FUNC int out_column(short d) const thread {
    return fragment_column(lane) + value_column() + d * FRAGMENT;
  }

  // Every SIMD group calls begin_block and multiply_keys.
  METAL_FUNC void begin_block(int kv_block) thread {
    first_key = kv_block;
    move_to(keys, values, first_key, BLOCK_K, lane);
    // Wait until every SIMD group has read the previous tiles.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_pairs<KvTileElement, BLOCK_K, QK_COLUMNS, THREADS, false>(
        k_tile, keys, first_key, sequence.first_key, sequence.kv_length, thread_index);
    if (!COLUMNS_SPLIT) { stage_values(); }
    // Wait until the tiles are completely written.
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  METAL_FUNC void stage_values() const thread {
    stage_rows<KvTileElement, BLOCK_K, V_SLICE, THREADS, HEAD_DIM_V>(
        v_tile, values, first_key, sequence.first_key, sequence.kv_length, first_value_column,
        thread_index);
  }

  // scores = q k^T if `seen`, which means that the SIMD group's queries see any of the keys.
  METAL_FUNC void multiply_keys(thread Scores& scores, thread const QueryTile& q,
                                bool seen) const thread {
    if (seen) {
      multiply_transposed<KvTileElement, QK_COLUMNS, OWN_QK_FRAGMENTS * FRAGMENT>(scores, q,
                                                                                  k_lane);
    }
    if (COLUMNS_SPLIT) {
      if (seen) { store_part(scores, score_parts, simdgroup, lane); }
      // Wait until every SIMD group has read the tile of K and written its part of the scores.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_values();
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (seen) { add_other_part(scores, score_parts, simdgroup, lane); }
    }
  }

  // o = o * corrections + weights v
  METAL_FUNC void accumulate_values(thread Out& o, thread const float* corrections,
                                    thread const Scores& weights) const thread {
    accumulate<KvTileElement, V_SLICE, OWN_V_FRAGMENTS * FRAGMENT>(o, corrections, weights, v_lane);
  }
};
