// The buffers of the backward kernels, and the row statistics that the forward has saved.
#pragma once

#include "inputs.h"
#include "params/backward.h"

using OutGradients = Operand<ELEMENT, HEAD_DIM_V>;

// The buffers that only the backward has, listed as in inputs.h. With EXACT_DELTA flash_bwd_dq
// writes the normalisers that the other kernels read.
#define NORMALISERS UNLESS(EXACT_DELTA, const) device float*
#define FLASH_BWD_BUFFERS(X)                                        \
  X(1, const device ELEMENT*, dout, FLASH_BWD_DOUT)                 \
  X(1, const device float*, lse, FLASH_BWD_LSE)                     \
  X(1, const device float*, delta, FLASH_BWD_DELTA)                 \
  X(NORMALISED, NORMALISERS, normalisers, FLASH_BWD_NORMALISERS)    \
  X(EXACT_DELTA, device float*, exact_delta, FLASH_BWD_EXACT_DELTA) \
  X(DLSE, const device float*, dlse, FLASH_BWD_DLSE)

#define FLASH_BWD_PARAMETERS FLASH_PARAMETERS FLASH_BWD_BUFFERS(FLASH_PARAMETER_WHEN)
#define FLASH_BWD_SET_OR_NULL(feature, type, name, slot) \
  buffers.name = WHEN(feature, name) UNLESS(feature, nullptr);
#define FLASH_BWD_SET_INPUTS               \
  FlashInputs inputs;                      \
  BackwardBuffers buffers;                 \
  FLASH_SET_INPUTS                         \
  FLASH_BWD_BUFFERS(FLASH_BWD_SET_OR_NULL) \
  constant FlashParams& problem = params.problem;

// The log-sum-exp is below this only if all scores of the row are near the lowest float.
constant constexpr float LOWEST_LSE = -2e38f;

// The saved log-sum-exp in base 2, or +inf, which makes all weights 0. It is +inf for a row that
// sees no key, and for a row whose scores are all the lowest float, which some masks use instead of
// -inf. The log-sum-exp of that row cannot hold both the score and the number of keys.
METAL_FUNC float lse_to_log2(float lse) { return lse < LOWEST_LSE ? INFINITY : lse * M_LOG2E_F; }

// exp(score - lse) / exp2(score - lse_log2): the effect of rounding lse_log2 on a weight.
METAL_FUNC float lse_log2_correction(float lse, float lse_log2) {
  return fma(-M_LN2_F, rounded_off(lse, lse_log2), 1.0f);
}

// Saved statistics of the queries of one (sequence, head).
struct QueryStatistics {
  const device float* lse;
  const device float* delta;
  const device float* normalisers;  // NORMALISED
  Offset first;

  METAL_FUNC float lse_of(int query) const thread { return lse[first + query]; }
  METAL_FUNC float delta_of(int query) const thread { return delta[first + query]; }
  METAL_FUNC float lse_log2(int query) const thread { return lse_to_log2(lse_of(query)); }

  // The factor that makes the sum of a row's weights exp2(score - lse_log2) 1.
  METAL_FUNC float weight_factor(int query) const thread {
    return normalisers[first + query] * lse_log2_correction(lse_of(query), lse_log2(query));
  }
};

struct BackwardBuffers {
  FLASH_BWD_BUFFERS(FLASH_FIELD_ALWAYS)

  METAL_FUNC OutGradients out_gradients(constant RowStrides& strides, int batch, int head,
                                        thread const Sequence& sequence) const thread {
    OutGradients operand;
    operand.reset(dout, strides, batch, head, sequence.q_start);
    return operand;
  }

  METAL_FUNC QueryStatistics statistics(constant RowStrides& strides, int batch, int head,
                                        thread const Sequence& sequence) const thread {
    return {lse, delta, normalisers, row_offset(strides, batch, head, 0) + sequence.q_start};
  }
};
