// Quantises columns of new K and V rows, with the same bits as torch_metal_attn/quantisation.py.
//
// A lane has CACHE_UNIT neighbouring columns. A scale's columns are in neighbouring lanes.
#pragma once

#include "quantised.h"

constant constexpr int CACHE_UNIT = 8;
// A unit in the cache: ELEMENTS elements, stored as STORES words.
template <int FORMAT>
struct StoredUnit {
  using Element = CacheElement<FORMAT>;
  static constant constexpr int BYTES =
      FORMAT == 0 ? CACHE_UNIT * int(sizeof(Element)) : CACHE_UNIT * kv_bits(FORMAT) / 8;
  static constant constexpr int ELEMENTS = BYTES / int(sizeof(Element));
  using Word = conditional_t<
      FORMAT == 0, uint4,
      conditional_t<kv_grouped(FORMAT), Element, conditional_t<kv_bits(FORMAT) == 4, uint, uint2>>>;
  static constant constexpr int STORES = BYTES / int(sizeof(Word));
};

// A number that is ordered like the magnitude of `value`, with NaN above infinity.
METAL_FUNC uint magnitude_bits(float value) { return as_type<uint>(value) & 0x7fffffffu; }

// The block's first value of largest magnitude. All lanes call it.
template <int FORMAT>
METAL_FUNC float block_extreme(thread const float* values, ushort lane) {
  constexpr int BLOCK_LANES = kv_scale_columns(FORMAT) / CACHE_UNIT;
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

// Returns the block's scale, or NaN if the scale is not finite. data: the unit's codes.
template <int FORMAT>
METAL_FUNC half quantise_unit(thread const float* values, ushort lane, thread uchar* data) {
  const float extreme = block_extreme<FORMAT>(values, lane);
  const half scale = half(FORMAT == KV_Q8_0 ? fabs(extreme) / 127.0f : extreme / -8.0f);
  const bool finite = isfinite(float(scale));
  const bool usable = finite && scale != half(0);
  const float step = usable ? float(scale) : 1.0f;
  float quotients[CACHE_UNIT];
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) { quotients[i] = usable ? rint(values[i] / step) : 0.0f; }
  UNROLL
  for (short i = 0; i < StoredUnit<FORMAT>::BYTES; i++) {
    if (FORMAT == KV_Q8_0) {
      data[i] = uchar(char(clamp(quotients[i], -127.0f, 127.0f)));
    } else {
      const uint low = uint(clamp(quotients[2 * i] + 8.0f, 0.0f, 15.0f));
      const uint high = uint(clamp(quotients[2 * i + 1] + 8.0f, 0.0f, 15.0f));
      data[i] = uchar(low | (high << 4));
    }
  }
  return finite ? scale : half(NAN);
}

// Returns the group's scale and minimum, or NaN if either is not finite.
template <int FORMAT>
METAL_FUNC half2 quantise_group(thread const float* values, thread uint& codes) {
  constexpr int BITS = kv_bits(FORMAT);
  constexpr float LAST = float((1 << BITS) - 1);
  float low = INFINITY;
  float high = -INFINITY;
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) {
    // NaN becomes infinity, because min and max would ignore NaN.
    const float value = isnan(values[i]) ? INFINITY : values[i];
    low = min(low, value);
    high = max(high, value);
  }
  UNROLL
  for (ushort distance = 1; distance < kv_scale_columns(FORMAT) / CACHE_UNIT; distance *= 2) {
    low = min(low, simd_shuffle_xor(low, distance));
    high = max(high, simd_shuffle_xor(high, distance));
  }
  // -0 becomes 0.
  const half minimum = half(low == 0.0f ? 0.0f : low);
  const half scale = half((high - low) / LAST);
  const bool finite = isfinite(float(scale)) && isfinite(float(minimum));
  const bool usable = finite && scale != half(0);
  codes = 0;
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) {
    const float quotient = usable ? rint((values[i] - float(minimum)) / float(scale)) : 0.0f;
    codes |= uint(clamp(quotient, 0.0f, LAST)) << (i * BITS);
  }
  return finite ? half2(scale, minimum) : half2(NAN);
}

// Rounds to nearest even and clamps to 448. Every NaN becomes 0x7f.
METAL_FUNC uchar fp8_e4m3(float value) {
  if (isnan(value)) { return 0x7f; }
  const float magnitude = min(fabs(value), 448.0f);
  const uint sign = (as_type<uint>(value) >> 24) & 0x80u;
  // Numbers below 2^-6 are multiples of 2^-9.
  if (magnitude < 0.015625f) { return uchar(sign | uint(rint(magnitude * 512.0f))); }
  // The exponent is rebased and the last 20 bits are rounded off. A carry goes into the exponent.
  const uint bits = as_type<uint>(magnitude);
  return uchar(sign | (((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3)));
}

METAL_FUNC void quantise_unit(thread const float* values, float scale, thread uchar* data) {
  UNROLL
  for (short i = 0; i < CACHE_UNIT; i++) { data[i] = fp8_e4m3(values[i] / scale); }
}
