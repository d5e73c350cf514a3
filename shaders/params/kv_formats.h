// How the numbers of K and V are stored in a cache.
#pragma once

#include "common.h"

// Values of KV_FORMAT and V_FORMAT: how the numbers of k and v are stored.
#define KV_Q8_0 1
#define KV_Q4_0 2
#define KV_FP8_E4M3 3
// Codes of so many bits; a group of so many columns shares a scale and a minimum.
#define KV_GROUPED(bits, group) ((bits) * 256 + (group))

constexpr bool kv_grouped(int format) { return format > KV_FP8_E4M3; }
constexpr int kv_bits(int format) {
  return kv_grouped(format) ? format / 256 : format == KV_Q4_0 ? 4 : 8;
}
// Columns that share a scale. fp8_e4m3 has one a head.
constexpr int kv_scale_columns(int format) { return kv_grouped(format) ? format % 256 : 32; }
// Numbers that they share: the scale, and of grouped formats the minimum.
constexpr int kv_scale_numbers(int format) { return kv_grouped(format) ? 2 : 1; }
// True if the numbers are exact codes times the scale of a span: kernels may multiply the codes.
constexpr bool kv_span_scaled(int format) { return format == KV_Q8_0 || format == KV_Q4_0; }
// True if scales are written with the rows.
constexpr bool kv_row_scales(int format) { return kv_span_scaled(format) || kv_grouped(format); }
