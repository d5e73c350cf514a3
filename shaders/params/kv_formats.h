// The formats in which a cache stores K and V.
#pragma once

#include "common.h"

// Values of KV_FORMAT and V_FORMAT.
#define KV_Q8_0 1
#define KV_Q4_0 2
#define KV_FP8_E4M3 3
// Codes of `bits` bits; each group of `group` columns shares a scale and a minimum.
#define KV_GROUPED(bits, group) ((bits) * 256 + (group))

constexpr bool kv_grouped(int format) { return format > KV_FP8_E4M3; }
constexpr int kv_bits(int format) {
  return kv_grouped(format) ? format / 256 : format == KV_Q4_0 ? 4 : 8;
}
// Columns that share a scale, except in fp8_e4m3, which has one scale for each head.
constexpr int kv_scale_columns(int format) { return kv_grouped(format) ? format % 256 : 32; }
// How many numbers these columns share: a scale, and in grouped formats a minimum.
constexpr int kv_scale_numbers(int format) { return kv_grouped(format) ? 2 : 1; }
// True if a number is an exact code times its span's scale. Kernels may then scale products.
constexpr bool kv_span_scaled(int format) { return format == KV_Q8_0 || format == KV_Q4_0; }
// True if each row has its own scales, which are written with the row.
constexpr bool kv_row_scales(int format) { return kv_span_scaled(format) || kv_grouped(format); }
