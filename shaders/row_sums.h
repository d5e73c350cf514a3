// Sums over a row's keys, which reveal the error of delta (flash_bwd_dq.metal).
#pragma once

#include "backward.h"
#include "softmax.h"

// The tolerated error of delta, relative to the sum of a row's absolute gradients: the largest of
// the roundings of dq, of tensor operations to 11 bits, and of float32 sums.
constant constexpr float FLOAT_SUMS_ROUNDING = 4.76837158e-7f;  // 2^-21
constant constexpr float LOWER_BOUND = TENSOR_TILES ? unit_roundoff<half>() : FLOAT_SUMS_ROUNDING;
constant constexpr float TOLERATED =
    unit_roundoff<ELEMENT>() > LOWER_BOUND ? unit_roundoff<ELEMENT>() : LOWER_BOUND;

// The errors that a row's sums reveal.
struct RowError {
  float delta_error;
  float normaliser;  // 1 / the sum of exp(score - log-sum-exp)
  float factor;      // what the row's weights are to be multiplied by
};

// Sums over the lane's columns of a row.
struct RowSums {
  float gradients;  // gradients of scores; the difference from the exact sum is the error of delta
  float sizes;      // absolute values of these gradients
  float weights;

  METAL_FUNC void reset() thread {
    gradients = 0.0f;
    sizes = 0.0f;
    weights = 0.0f;
  }

  // As in `accumulate`, a block's values are summed separately first.
  template <int FRAGMENTS>
  METAL_FUNC void add(thread const Fragment<float>* block, Fragment<float> block_weights) thread {
    Fragment<float> sum = block[0];
    Fragment<float> size = fabs(block[0]);
    UNROLL
    for (short j = 1; j < FRAGMENTS; j++) {
      sum += block[j];
      size += fabs(block[j]);
    }
    gradients += sum.x + sum.y;
    sizes += size.x + size.y;
    weights += block_weights.x + block_weights.y;
  }

  // The errors of the whole row. sink: a logit. dlse: the gradient of the log-sum-exp.
  METAL_FUNC RowError merge_lanes(float row_lse, float lse_log2, float row_delta, float sink,
                                  float dlse) thread {
    RowError error;
    error.normaliser = 1.0f;
    error.factor = 1.0f;
    sizes = fragment_row_sum(sizes);
    float sum = fragment_row_sum(gradients);
    if (NORMALISED) {
      const float correction = lse_log2_correction(row_lse, lse_log2);
      float row_sum = fragment_row_sum(weights) * correction;
      sum *= correction;
      if (SINK) {
        const float sink_weight =
            lse_log2 == INFINITY ? 0.0f : fast::exp2((sink - row_lse) * M_LOG2E_F);
        sum -= sink_weight * row_delta;
        row_sum += sink_weight;
      }
      error.normaliser = row_sum > 0.0f ? 1.0f / row_sum : 1.0f;
      error.factor = error.normaliser * correction;
      sum *= error.normaliser;
    }
    // A row without a key has no weights.
    error.delta_error = lse_log2 == INFINITY ? 0.0f : sum - dlse;
    return error;
  }
};
