// Multiplies each block of HADAMARD columns of a row by the orthonormal Hadamard matrix
// (Sylvester's), which is its own inverse. The steps form sums and differences of columns at
// distances 1, 2, 4, ... HADAMARD / 2.
//
// Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024). The transform
// spreads a column of large values over its block, which reduces the quantisation error.
// Transformed q and k have the same scores.
#pragma once

#include "tile.h"

#ifndef HADAMARD
#define HADAMARD 0
#endif

// The distances 1 to 16 combine columns of one span of 32. HADAMARD_SCALE is 1 / sqrt(HADAMARD).
constant constexpr int HADAMARD_SPANS = HADAMARD / 32;
constant constexpr float HADAMARD_SCALE = HADAMARD == 32   ? 0.17677669529663687f
                                          : HADAMARD == 64 ? 0.125f
                                                           : 0.08838834764831845f;

// For each distance 1, 2, 4, ... below COUNT: replaces each two values at that distance with their
// sum and difference.
template <int COUNT>
METAL_FUNC void hadamard_values(thread float* values) {
  UNROLL
  for (short distance = 1; distance < COUNT; distance *= 2) {
    UNROLL
    for (short i = 0; i < COUNT; i++) {
      if ((i & distance) == 0) {
        const float sum = values[i] + values[i + distance];
        values[i + distance] = values[i] - values[i + distance];
        values[i] = sum;
      }
    }
  }
}

// The same for values of lanes whose numbers differ only in `bit`: one lane gets the sum, and the
// other lane the difference.
template <int COUNT>
METAL_FUNC void hadamard_lanes(thread float* values, ushort lane, ushort bit) {
  UNROLL
  for (short i = 0; i < COUNT; i++) {
    const float other = simd_shuffle_xor(values[i], bit);
    values[i] = (lane & bit) != 0 ? other - values[i] : values[i] + other;
  }
}

// The whole transform. Neighbouring lanes have 8 neighbouring columns each.
METAL_FUNC void hadamard_unit(thread float* values, ushort lane) {
  hadamard_values<8>(values);
  UNROLL
  for (ushort bit = 1; bit < HADAMARD / 8; bit *= 2) { hadamard_lanes<8>(values, lane, bit); }
  UNROLL
  for (short i = 0; i < 8; i++) { values[i] *= HADAMARD_SCALE; }
}

// The sign with which span `from` of a block is added to span `to` of the result.
METAL_FUNC float hadamard_sign(int from, int to) {
  return popcount(uint(from & to)) % 2 == 0 ? 1.0f : -1.0f;
}
