// Columns of new K and V rows in a cache's format, with the same bits as
// torch_metal_attn/quantisation.py.
//
// A lane holds CACHE_UNIT neighbouring columns; the four lanes of a scale's 32 columns are
// neighbours in a SIMD group.
#pragma once

#include "params.h"
#include "quantised.h"
#include "tile.h"

constant constexpr int CACHE_UNIT = 8;
constant constexpr int BLOCK_LANES = SCALE_COLUMNS / CACHE_UNIT;

// The elements of a cache that a unit is, and the type that moves them: UNIT_STORES times.
using CacheWord = conditional_t<!QUANTISED, uint4, conditional_t<KV_BITS == 4, uint, uint2>>;
constant constexpr int UNIT_ELEMENTS = QUANTISED ? CACHE_UNIT * KV_BITS / 8 : CACHE_UNIT;
constant constexpr int UNIT_STORES =
    UNIT_ELEMENTS * int(sizeof(KV_ELEMENT)) / int(sizeof(CacheWord));

// Ordered as magnitudes are, with NaN above infinity.
METAL_FUNC uint magnitude_bits(float value) { return as_type<uint>(value) & 0x7fffffffu; }

// The value of largest magnitude of the block, the first of equals. Uniform in the SIMD group.
METAL_FUNC float block_extreme(thread const float* values, ushort lane) {
  float extreme = values[0];
  UNROLL
  for (short i = 1; i < CACHE_UNIT; i++) {
    extreme = magnitude_bits(values[i]) > magnitude_bits(extreme) ? values[i] : extreme;
  }
  UNROLL
  for (ushort distance = 1; distance < BLOCK_LANES; distance *= 2) {
    const float other = simd_shuffle_xor(extreme, distance);
    const uint own_bits = magnitude_bits(extreme);
    const uint other_bits = magnitude_bits(other);
    const bool other_is_before = (lane & distance) != 0;
    extreme =
        other_bits > own_bits || (other_bits == own_bits && other_is_before) ? other : extreme;
  }
  return extreme;
}

// The block's scale, NaN where it is not finite, and the unit's data.
METAL_FUNC half quantise_unit(thread const float* values, ushort lane, thread uchar* data) {
  const float extreme = block_extreme(values, lane);
  const half scale = half(KV_BITS == 8 ? fabs(extreme) / 127.0f : extreme / -8.0f);
  const bool finite = isfinite(float(scale));
  const bool usable = finite && scale != half(0);
  const float step = usable ? float(scale) : 1.0f;
  float quotients[CACHE_UNIT];
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) {
    quotients[i] = usable ? rint(values[i] / step) : 0.0f;
  }
  UNROLL
  for (short i = 0; i < UNIT_ELEMENTS; i++) {
    if (KV_BITS == 8) {
      data[i] = uchar(char(clamp(quotients[i], -127.0f, 127.0f)));
    } else {
      const uint low = uint(clamp(quotients[2 * i] + 8.0f, 0.0f, 15.0f));
      const uint high = uint(clamp(quotients[2 * i + 1] + 8.0f, 0.0f, 15.0f));
      data[i] = uchar(low | (high << 4));
    }
  }
  return finite ? scale : half(NAN);
}

// Rounds to nearest even and clamps to 448. Every NaN becomes 0x7f.
METAL_FUNC uchar fp8_e4m3(float value) {
  if (isnan(value)) {
    return 0x7f;
  }
  const float magnitude = min(fabs(value), 448.0f);
  const uint sign = (as_type<uint>(value) >> 24) & 0x80u;
  // Below 2^-6 the code counts steps of 2^-9.
  if (magnitude < 0.015625f) {
    return uchar(sign | uint(rint(magnitude * 512.0f)));
  }
  // Else the exponent is rebased and 20 bits are rounded off, with a carry into the exponent.
  const uint bits = as_type<uint>(magnitude);
  return uchar(sign | (((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3)));
}

METAL_FUNC void quantise_unit(thread const float* values, float scale, thread uchar* data) {
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) {
    data[i] = fp8_e4m3(values[i] / scale);
  }
}
