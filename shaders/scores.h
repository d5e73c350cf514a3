// What changes scores between the product and the softmax, in this order: cap, ALiBi, bias, mask.
// From the cap on, scores are in base 2: multiplied by log2(e).
#pragma once

#include "tile.h"

// A bias in base 2. A finite one stays finite, so that a row of nothing but the lowest float is
// uniform, as in any softmax, and not hidden.
template <typename T>
METAL_FUNC float base_2(T bias) {
  const float value = float(bias);
  const float scaled = value * M_LOG2E_F;
  return scaled == -INFINITY && value != -INFINITY ? LOWEST_FLOAT : scaled;
}

// cap * tanh(score / cap) of Gemma 2 (2024), which sees natural units: scores come as plain
// products.
template <int ROWS, int COLUMNS>
METAL_FUNC void cap_scores(thread RegisterTile<float, ROWS, COLUMNS>& scores, float scale_over_cap,
                           float cap_log2) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      scores.fragments[i][j] = cap_log2 * precise::tanh(scores.fragments[i][j] * scale_over_cap);
    }
  }
}

// Subtracts slope * |distance|, Press et al., "Train Short, Test Long" (2021). `distance` is that
// of the lane's first element, query minus key.
template <int ROWS, int COLUMNS>
METAL_FUNC void add_alibi(thread RegisterTile<float, ROWS, COLUMNS>& scores, float slope_log2,
                          float distance) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      const float first = distance + float((i - j) * FRAGMENT);
      scores.fragments[i][j] -= slope_log2 * Fragment<float>(fabs(first), fabs(first - 1.0f));
    }
  }
}

// Two neighbouring elements in one load.
template <typename T>
METAL_FUNC Fragment<T> load_pair(const device T* first) {
  return *reinterpret_cast<const device Fragment<T>*>(first);
}

// A compiler would make two loads of a vector of bytes.
METAL_FUNC Fragment<uchar> load_pair(const device uchar* first) {
  const ushort both = *reinterpret_cast<const device ushort*>(first);
  return Fragment<uchar>(uchar(both & 0xff), uchar(both >> 8));
}

// The rows of a mask or bias that belong to a lane's rows of a tile.
template <typename T, int ROWS, bool PAIRS>
struct MaskRows {
  const device T* rows[ROWS];
  int64_t key_stride;
  int last_key;

  // `mask` is that of the (sequence, head); queries past the end repeat the last one.
  METAL_FUNC void reset(const device T* mask, constant MaskStrides& strides, int query,
                        int last_query, int keys) thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      rows[i] = mask + min(query + i * FRAGMENT, last_query) * strides.query;
    }
    key_stride = strides.key;
    last_key = keys - 1;
  }

  // Keys `key` and `key + 1` of a row; those past the end repeat the last.
  METAL_FUNC Fragment<T> pair(short row, int key) const thread {
    if (PAIRS) {
      return load_pair(rows[row] + min(key, last_key - 1));
    }
    return Fragment<T>(rows[row][min(key, last_key) * key_stride],
                       rows[row][min(key + 1, last_key) * key_stride]);
  }
};

template <int ROWS, int COLUMNS, typename Bias>
METAL_FUNC void add_bias(thread RegisterTile<float, ROWS, COLUMNS>& scores, thread const Bias& bias,
                         int key) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      const auto pair = bias.pair(i, key + j * FRAGMENT);
      scores.fragments[i][j] += Fragment<float>(base_2(pair.x), base_2(pair.y));
    }
  }
}

template <int ROWS, int COLUMNS, typename Mask>
METAL_FUNC void hide_masked(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                            thread const Mask& mask, int key) {
  UNROLL
  for (short i = 0; i < ROWS; i++) {
    UNROLL
    for (short j = 0; j < COLUMNS; j++) {
      const auto visible = mask.pair(i, key + j * FRAGMENT);
      thread Fragment<float>& score = scores.fragments[i][j];
      score = Fragment<float>(visible.x ? score.x : -INFINITY, visible.y ? score.y : -INFINITY);
    }
  }
}
