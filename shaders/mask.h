// The keys that a query may see because of lengths, window and chunk. scores.h applies attn_mask.
#pragma once

#include "sequence.h"
#include "tile.h"

// Rows [begin, end).
struct Range {
  int begin;
  int end;
};

// Every query sees one range of keys: the existing keys in its window and its chunk. Every key is
// seen by one range of queries. The ends of both ranges are monotonic in the query or the key.
struct Visibility {
  Range existing;  // keys that exist
  int q_length;
  int64_t q_offset;      // the position of query i is key i + q_offset (BAND, CHUNKED, ALIBI)
  int64_t window_left;   // BAND
  int64_t window_right;  // BAND
  int chunk;             // CHUNKED

  METAL_FUNC void reset(thread const Sequence& sequence, constant FlashParams& params) thread {
    existing.begin = sequence.first_key;
    existing.end = sequence.kv_length;
    q_length = sequence.q_length;
    if (BAND || CHUNKED || ALIBI) {
      q_offset =
          params.bottom_right ? int64_t(sequence.kv_length) - sequence.q_length : params.q_offset;
    }
    if (BAND) {
      window_left = params.window_left;
      window_right = params.window_right;
    }
    if (CHUNKED) { chunk = params.chunk; }
  }

  // The first position of the chunk that contains `position`, which is not before the first key.
  METAL_FUNC int64_t chunk_begin(int64_t position) const thread {
    const uint first = uint(position - existing.begin);
    return existing.begin + int64_t(first / uint(chunk)) * chunk;
  }

  METAL_FUNC Range keys_of(int query) const thread {
    int64_t begin = existing.begin;
    int64_t end = existing.end;
    const int64_t position = query + q_offset;
    if (BAND && window_left != NO_WINDOW) { begin = max(begin, position - window_left); }
    if (BAND && window_right != NO_WINDOW) { end = min(end, position + window_right + 1); }
    if (CHUNKED) {
      // Positions before the first key are in no chunk.
      const bool outside = position < existing.begin;
      const int64_t chunk_start = outside ? int64_t(existing.begin) : chunk_begin(position);
      begin = max(begin, chunk_start);
      end = min(end, outside ? chunk_start : chunk_start + chunk);
    }
    return within(begin, end, existing.begin, existing.end);
  }

  METAL_FUNC Range queries_of(int key) const thread {
    int64_t begin = 0;
    int64_t end = key >= existing.begin && key < existing.end ? q_length : 0;
    if (BAND && window_left != NO_WINDOW) { end = min(end, key - q_offset + window_left + 1); }
    if (BAND && window_right != NO_WINDOW) { begin = max(begin, key - q_offset - window_right); }
    if (CHUNKED) {
      const int64_t chunk_start = chunk_begin(max(key, existing.begin));
      begin = max(begin, chunk_start - q_offset);
      end = min(end, chunk_start - q_offset + chunk);
    }
    return within(begin, end, 0, q_length);
  }

  // [begin, end) as 32-bit numbers: begin is at most `last`, and end at least `first`.
  METAL_FUNC static Range within(int64_t begin, int64_t end, int first, int last) {
    Range range;
    range.begin = int(min(begin, int64_t(last)));
    range.end = int(max(end, int64_t(first)));
    return range;
  }

  // Sets scores (or slopes) that are masked out to `hidden`. `row` and `column` are those of the
  // lane's first element: the query and the key, or with TRANSPOSED the key and the query.
  template <bool TRANSPOSED, int ROWS, int COLUMNS>
  METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& scores, int row, int column,
                        float hidden = -INFINITY) const thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      const Range range = TRANSPOSED ? queries_of(row + i * FRAGMENT) : keys_of(row + i * FRAGMENT);
      const int begin = range.begin - column;
      const int end = range.end - column;
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        thread Fragment<float>& score = scores.fragments[i][j];
        const int first = column_offset(j);
        const bool first_hidden = first < begin || first >= end;
        const bool second_hidden = first + 1 < begin || first + 1 >= end;
        score = Fragment<float>(first_hidden ? hidden : score.x, second_hidden ? hidden : score.y);
      }
    }
  }
};

// The keys that any or all queries of a SIMD group see, or the queries that see any or all keys.
struct SeenRows {
  Range union_range;
  Range intersection_range;

  // For the queries [first, first + count) that are not after last_query.
  METAL_FUNC void reset(thread const Visibility& visible, int first, int count,
                        int last_query) thread {
    const Range first_range = visible.keys_of(first);
    const Range last_range = visible.keys_of(min(first + count - 1, last_query));
    union_range.begin = first_range.begin;
    union_range.end = first > last_query ? 0 : last_range.end;
    intersection_range.begin = last_range.begin;
    intersection_range.end = first_range.end;
  }

  // True if any of the keys (or queries) [block, block + count) is in the union.
  METAL_FUNC bool any_in(int block, int count) const thread {
    return block < union_range.end && block + count > union_range.begin;
  }

  // True if any of these keys is masked out for any query. In flash_fwd `hides_in` takes up to 11
  // registers fewer than `!all_in()`.
  METAL_FUNC bool hides_in(int block, int count) const thread {
    return block < intersection_range.begin || block + count > intersection_range.end;
  }

  // True if all of these keys (or queries) are in the intersection.
  METAL_FUNC bool all_in(int block, int count) const thread {
    return block >= intersection_range.begin && block + count <= intersection_range.end;
  }
};
