// Softmax over values that arrive block by block, in fragments or in rows that lanes read together.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Scores of fragments
// are in base 2, that is multiplied by log2(e), and exp2 replaces exp.
#pragma once

#include "tile.h"

// The maximum of a row without visible keys. With -inf, exp2(-inf - row_max) would be NaN.
constant constexpr float MASKED_ROW_MAX = LOWEST_FLOAT;

METAL_FUNC float fragment_row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float fragment_row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

struct OnlineSoftmax {
  float row_max;
  float lane_sum;  // of the lane's columns

  // sink_log2: a logit without a key (gpt-oss, 2025). The sink's weight is added at the end, so
  // that a much smaller sum of the keys' weights is not lost.
  METAL_FUNC void reset(float sink_log2 = MASKED_ROW_MAX) thread {
    row_max = max(sink_log2, MASKED_ROW_MAX);
    lane_sum = 0.0f;
  }

  // Turns a row's scores, [8, FRAGMENTS * 8], into weights relative to the running maximum. Returns
  // the factor of all earlier sums.
  template <int FRAGMENTS>
  METAL_FUNC float update(thread Fragment<float>* scores) thread {
    float block_max = max(scores[0].x, scores[0].y);
    UNROLL
    for (short j = 1; j < FRAGMENTS; j++) {
      block_max = max(block_max, max(scores[j].x, scores[j].y));
    }
    const float new_max = max(row_max, fragment_row_max(block_max));
    const float correction = fast::exp2(row_max - new_max);
    row_max = new_max;
    lane_sum *= correction;
    UNROLL
    for (short j = 0; j < FRAGMENTS; j++) {
      scores[j] = fast::exp2(scores[j] - new_max);
      lane_sum += scores[j].x + scores[j].y;
    }
    return correction;
  }

  // The sum of the keys' weights; 0 if no key was visible.
  METAL_FUNC float row_sum() const thread { return fragment_row_sum(lane_sum); }

  // The natural logarithm of the sum of exp(score). row_sum: the sum of weights.
  METAL_FUNC float logsumexp(float row_sum) const thread {
    return row_sum == 0.0f ? -INFINITY : (row_max + log2(row_sum)) * M_LN2_F;
  }
};

// The maximum and the sum of exp(x - row_max) of the values that a lane has read: algorithm 3 of
// the paper. With BASE_2 values are in base 2. Other values are not converted to it, because the
// rounding error of x * log2(e) grows with x, and that of (x - row_max) * log2(e) does not.
template <bool BASE_2>
struct Normaliser {
  float row_max;
  float row_sum;

  METAL_FUNC static float to_base_2(float x) { return BASE_2 ? x : x * M_LOG2E_F; }

  METAL_FUNC void reset() thread {
    row_max = MASKED_ROW_MAX;
    row_sum = 0.0f;
  }

  // exp(x - row_max), or exp2 of it with BASE_2.
  METAL_FUNC float weight(float x) const thread { return fast::exp2(to_base_2(x - row_max)); }

  // Raises the maximum. Returns the factor of earlier sums of weights.
  METAL_FUNC float raise(float new_max) thread {
    const float correction = fast::exp2(to_base_2(row_max - new_max));
    row_sum *= correction;
    row_max = new_max;
    return correction;
  }

  template <int VALUES>
  METAL_FUNC void update(thread const float* values) thread {
    float new_max = row_max;
    UNROLL
    for (short i = 0; i < VALUES; i++) { new_max = max(new_max, values[i]); }
    raise(new_max);
    float sum = 0.0f;
    UNROLL
    for (short i = 0; i < VALUES; i++) { sum += weight(values[i]); }
    row_sum += sum;
  }

  // Merges the normalisers of all lanes of the SIMD group.
  METAL_FUNC void merge_lanes() thread {
    raise(simd_max(row_max));
    row_sum = simd_sum(row_sum);
  }

  // The factor of the weights; 0 if all values of the row are -inf.
  METAL_FUNC float finalize() const thread { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }

  // The natural logarithm of the sum of exp(x), or of exp2(x) with BASE_2.
  METAL_FUNC float logsumexp() const thread {
    if (row_sum == 0.0f) { return -INFINITY; }
    return BASE_2 ? (row_max + log2(row_sum)) * M_LN2_F : row_max + log(row_sum);
  }
};

using SoftmaxNormaliser = Normaliser<false>;
