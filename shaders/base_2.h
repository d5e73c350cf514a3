// Logits in base 2, that is multiplied by log2(e), so that exp2 replaces exp.
#pragma once

#include "tile.h"

// A logit in base 2. Finite logits stay finite: a row whose logits are all the lowest float has
// uniform weights, as in any softmax, and is not masked out.
template <typename T>
METAL_FUNC float base_2(T logit) {
  const float value = float(logit);
  const float scaled = value * M_LOG2E_F;
  const bool overflows = fabs(scaled) == INFINITY && fabs(value) != INFINITY;
  return overflows ? (value < 0.0f ? LOWEST_FLOAT : -LOWEST_FLOAT) : scaled;
}

// log2(e) - M_LOG2E_F.
constant constexpr float LOG2E_REST = 1.92596299e-8f;

// value * log2(e) - scaled, the rounding error of `scaled`. An error of 0.5 or more counts as 0:
// such values are so large that float32 weights cannot resolve the error.
METAL_FUNC float rounded_off(float value, float scaled) {
  const float rest = fma(value, M_LOG2E_F, -scaled) + value * LOG2E_REST;
  return fabs(rest) < 0.5f ? rest : 0.0f;
}

// logit * log2(e) - other, without the rounding error of the product. This error would be the same
// in all rows, and would add up in sums over rows.
template <typename T>
METAL_FUNC float base_2_less(T logit, float other) {
  const float scaled = base_2(logit);
  return (scaled - other) + rounded_off(float(logit), scaled);
}
