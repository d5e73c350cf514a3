// The keys a query sees, but for masks that are given key by key (scores.h).
#pragma once

#include "sequence.h"
#include "tile.h"

// Keys [begin, end).
struct KeyRange {
  int begin;
  int end;
};

// Every query sees one range of keys: those that exist, cut by its window and by its chunk. Both
// ends of the range only grow with the query.
struct VisibleKeys {
  KeyRange existing;
#if BAND || CHUNKED || ALIBI
  int64_t q_offset;  // query i stands at key i + q_offset
#endif
#if BAND
  int64_t window_left;
  int64_t window_right;
#endif
#if CHUNKED
  int chunk;
  int chunk_origin;
#endif

  METAL_FUNC void reset(thread const Sequence& sequence, constant FlashFwdParams& params) thread {
    existing.begin = sequence.first_key;
    existing.end = sequence.kv_length;
#if BAND || CHUNKED || ALIBI
    q_offset =
        params.bottom_right ? int64_t(sequence.kv_length) - sequence.q_length : params.q_offset;
#endif
#if BAND
    window_left = params.window_left;
    window_right = params.window_right;
#endif
#if CHUNKED
    chunk = params.chunk;
    chunk_origin = sequence.first_key;
#endif
  }

  METAL_FUNC KeyRange of(int query) const thread {
    KeyRange range = existing;
#if BAND || CHUNKED
    int64_t begin = range.begin;
    int64_t end = range.end;
    const int64_t position = query + q_offset;
#endif
#if BAND
    if (window_left != NO_WINDOW) {
      begin = max(begin, position - window_left);
    }
    if (window_right != NO_WINDOW) {
      end = min(end, position + window_right + 1);
    }
#endif
#if CHUNKED
    // Before the first chunk there are no keys.
    const int64_t first = position - chunk_origin;
    const int64_t chunk_begin =
        chunk_origin + (first < 0 ? 0 : int64_t(uint(first) / uint(chunk)) * chunk);
    begin = max(begin, chunk_begin);
    end = min(end, first < 0 ? chunk_origin : chunk_begin + chunk);
#endif
#if BAND || CHUNKED
    range.begin = int(min(begin, int64_t(existing.end)));
    range.end = int(max(end, int64_t(existing.begin)));
#endif
    return range;
  }

  // Hides what the queries do not see; `query` and `key` are those of the lane's first element.
  template <int ROWS, int COLUMNS>
  METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& scores, int query,
                        int key) const thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      const KeyRange range = of(query + i * FRAGMENT);
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        thread Fragment<float>& score = scores.fragments[i][j];
        const int column = key + j * FRAGMENT;
        const bool first_hidden = column < range.begin || column >= range.end;
        const bool second_hidden = column + 1 < range.begin || column + 1 >= range.end;
        score = Fragment<float>(first_hidden ? -INFINITY : score.x,
                                second_hidden ? -INFINITY : score.y);
      }
    }
  }
};
