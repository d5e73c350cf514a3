// The keys a query sees.
#pragma once

#include "tile.h"

// Query i sees key j iff j < kv_length and, if causal, j <= i + offset. Positions are compared as
// j - i, which fits 32 bits where i + offset may not.
struct CausalMask {
  int kv_length;
  int offset;
  bool causal;

  METAL_FUNC bool visible(int query, int key) const thread {
    return key < kv_length && (!causal || key - query <= offset);
  }

  // One past the last key that `query`, and so any query before it, sees.
  METAL_FUNC int kv_end(int query) const thread {
    if (!causal) {
      return kv_length;
    }
    const int64_t end = int64_t(query) + offset + 1;
    return end < 0 ? 0 : (end < kv_length ? int(end) : kv_length);
  }

  // Whether every query from `first_query` on sees every key before `kv_block_end`.
  METAL_FUNC bool block_visible(int first_query, int kv_block_end) const thread {
    return visible(first_query, kv_block_end - 1);
  }

  // Hides what the queries do not see; `query` and `key` are those of the lane's first element.
  template <int ROWS, int COLUMNS>
  METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& scores, int query,
                        int key) const thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        thread Fragment<float>& score = scores.fragments[i][j];
        const int row = query + i * FRAGMENT;
        const int column = key + j * FRAGMENT;
        score = Fragment<float>(visible(row, column) ? score.x : -INFINITY,
                                visible(row, column + 1) ? score.y : -INFINITY);
      }
    }
  }
};
