// What the backward kernels share: weights and their gradient from saved row statistics.
#pragma once

#include "inputs.h"

using OutGradients = Operand<ELEMENT, HEAD_DIM_V>;

// Only rows that hold nothing but the lowest float, or nearly so, have a lower log-sum-exp.
constant constexpr float LOWEST_LSE = -2e38f;

// The saved log-sum-exp in base 2, or +inf, which makes weights 0, for a row that sees no key. The
// same for rows of the lowest float, which some masks use instead of -inf: one float cannot hold
// both their score and how many keys share the weight.
METAL_FUNC float weight_origin(float lse) { return lse < LOWEST_LSE ? INFINITY : lse * M_LOG2E_F; }

// exp(score - lse) over exp2(score - origin): what the rounding of the origin makes of a weight.
METAL_FUNC float origin_correction(float lse, float origin) {
  return fma(-M_LN2_F, rounded_off(lse, origin), 1.0f);
}

#if NORMALISED
// By what weights exp2(score - origin) are multiplied, so that a row's add up to 1.
METAL_FUNC float weight_factor(float normaliser, float lse) {
  return normaliser * origin_correction(lse, weight_origin(lse));
}
#endif
