// Softmax over values that arrive block by block: of rows of fragments, and of rows that lanes
// share.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), in base 2: scores of
// fragments come multiplied by log2(e), so exp2 stands for exp.
#pragma once

#include "tile.h"

// Not above any finite score, and finite: with -inf here, exp2(-inf - row_max) would be NaN and not
// 0.
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
  // The lane's own columns only: the row's sum is taken once, at the end.
  float lane_sum;

  // sink_log2: a logit that has no key (gpt-oss, 2025). Its weight is added to the sum at the end,
  // so that the sum of the keys' weights stays known, even if it is much smaller.
  METAL_FUNC void reset(float sink_log2 = MASKED_ROW_MAX) thread {
    row_max = max(sink_log2, MASKED_ROW_MAX);
    lane_sum = 0.0f;
  }

  // Turns a row's scores, [8, FRAGMENTS * 8], into weights relative to the running maximum. Returns
  // the factor of the sums that were accumulated before.
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

  // The sum of the keys' weights: 0 where none was visible.
  METAL_FUNC float row_sum() const thread { return fragment_row_sum(lane_sum); }

  // Natural logarithm of the sum of exp(score), of which `row_sum` is the sum of weights.
  METAL_FUNC float logsumexp(float row_sum) const thread {
    return row_sum == 0.0f ? -INFINITY : (row_max + log2(row_sum)) * M_LN2_F;
  }
};

// A row's maximum and its sum of exp(x - row_max), of the values that a lane has seen: algorithm 3
// of the paper. Values are in natural units: x - row_max is taken before the scaling by log2(e),
// whose rounding would grow with x.
struct SoftmaxNormaliser {
  float row_max;
  float row_sum;

  METAL_FUNC void reset() thread {
    row_max = MASKED_ROW_MAX;
    row_sum = 0.0f;
  }

  // exp(x - row_max)
  METAL_FUNC float weight(float x) const thread { return fast::exp2((x - row_max) * M_LOG2E_F); }

  // Moves to a maximum that is not lower. Returns the factor of the earlier sums of weights.
  METAL_FUNC float raise(float new_max) thread {
    const float correction = fast::exp2((row_max - new_max) * M_LOG2E_F);
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

  // Merges the normalisers of all lanes of the SIMD group, with the same result in each.
  METAL_FUNC void merge_lanes() thread {
    raise(simd_max(row_max));
    row_sum = simd_sum(row_sum);
  }

  // The factor of the weights. A row of only -inf has no sum, and gives 0.
  METAL_FUNC float finalize() const thread { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }

  // Natural logarithm of the sum of exp(x), over the values that are in row_sum.
  METAL_FUNC float logsumexp() const thread {
    return row_sum == 0.0f ? -INFINITY : row_max + log(row_sum);
  }
};
