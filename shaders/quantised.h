// Dequantises K and V in registers. torch_metal_attn/quantisation.py defines the formats.
#pragma once

#include "params/kv_formats.h"
#include "tile.h"

// The type of K and V if they are not quantised. The host defines it if it is not ELEMENT, as for
// float32 queries on a half precision cache.
#ifndef KV_ELEMENT
#define KV_ELEMENT ELEMENT
#endif

// The elements that hold codes. In grouped formats the 8 codes of a unit are one element, but three
// bytes if codes have 3 bits. In other formats the elements are bytes.
template <int FORMAT>
using CodeElement = conditional_t<!kv_grouped(FORMAT) || kv_bits(FORMAT) == 3, uchar,
                                  conditional_t<kv_bits(FORMAT) == 4, uint, ushort>>;
template <int FORMAT>
using CacheElement = conditional_t<FORMAT == 0, KV_ELEMENT, CodeElement<FORMAT>>;
template <int FORMAT>
using ScaleElement = conditional_t<kv_row_scales(FORMAT), half, float>;

using KeyElement = CacheElement<KV_FORMAT>;
using ValueElement = CacheElement<V_FORMAT>;

// The type of K and V in tiles and fragments: codes become ELEMENT when they are read. Other types
// are kept, because the matrix unit multiplies float by half and by bfloat.
using KvTileElement = conditional_t<QUANTISED, ELEMENT, KV_ELEMENT>;

constant constexpr bool K_SPAN_SCALES = kv_span_scaled(KV_FORMAT);
constant constexpr bool V_SPAN_SCALES = kv_span_scaled(V_FORMAT);

// The codes of COUNT neighbouring columns, the first in the lowest bits; 0 from column COLUMNS on.
template <int FORMAT, int COLUMNS, int COUNT>
METAL_FUNC uint2 load_codes(const device CacheElement<FORMAT>* tensor, Offset row, int column) {
  if (kv_grouped(FORMAT)) {
    constexpr int ELEMENTS = kv_bits(FORMAT) == 3 ? 3 : 1;  // of 8 codes
    const device CodeElement<FORMAT>* unit =
        reinterpret_cast<const device CodeElement<FORMAT>*>(tensor) + (row + column / 8 * ELEMENTS);
    uint word = uint(unit[0]);
    if (ELEMENTS == 3) { word |= uint(unit[1]) << 8 | uint(unit[2]) << 16; }
    return uint2(COUNT == 8 ? word : word >> (column % 8 * kv_bits(FORMAT)), 0);
  }
  constexpr int BYTES = COUNT * kv_bits(FORMAT) / 8;
  const device uchar* first =
      reinterpret_cast<const device uchar*>(tensor) + (row + column * kv_bits(FORMAT) / 8);
  if (WIDE_LOADS && BYTES == 8) { return *reinterpret_cast<const device uint2*>(first); }
  if (WIDE_LOADS && BYTES == 4) { return uint2(*reinterpret_cast<const device uint*>(first), 0); }
  if (WIDE_LOADS) { return uint2(*reinterpret_cast<const device ushort*>(first), 0); }
  uint2 codes = uint2(0);
  UNROLL
  for (short i = 0; i < BYTES; i++) {
    if (COLUMNS % FRAGMENT == 0 || column + i < COLUMNS) {
      codes[i / 4] |= uint(first[i]) << (i % 4 * 8);
    }
  }
  return codes;
}

// 4 bits of exponent and 3 bits of fraction: Micikevicius et al., "FP8 Formats for Deep Learning"
// (2022). Numbers below 2^-6 are multiples of 2^-9; conversions would flush these denormals to 0.
METAL_FUNC float e4m3(uint code) {
  const uint magnitude = code & 0x7f;
  const float normal = as_type<float>((magnitude << 20) + (120u << 23));
  const float finite = magnitude < 8 ? float(magnitude) * 0.001953125f : normal;
  const float value = magnitude == 0x7f ? NAN : finite;
  return (code & 0x80) != 0 ? -value : value;
}

// The number of code i, without its scale.
template <int FORMAT>
METAL_FUNC float number(uint2 codes, short i) {
  constexpr int BITS = kv_bits(FORMAT);
  const uint code = codes[i * BITS / 32] >> (i * BITS % 32);
  if (kv_grouped(FORMAT)) { return float(code & ((1u << BITS) - 1)); }
  if (FORMAT == KV_Q8_0) { return float(as_type<char>(uchar(code & 0xff))); }
  if (FORMAT == KV_Q4_0) { return float(int(code & 15) - 8); }
  return e4m3(code);
}

// The exact numbers of COUNT codes of q8_0 or q4_0, without their scale.
template <int FORMAT, typename T, int COUNT>
METAL_FUNC void expand(thread T* values, uint2 codes, thread const T*) {
  UNROLL
  for (short i = 0; i < COUNT; i++) { values[i] = T(number<FORMAT>(codes, i)); }
}

// Expands two codes at a time without conversions: the half with bits 0x6400 | n is 1024 + n.
template <int FORMAT, typename T, int COUNT>
METAL_FUNC void expand(thread half* values, uint2 codes, thread const half*) {
  constexpr int BITS = FORMAT == KV_Q4_0 ? 4 : 8;
  constexpr int WORD_CODES = 32 / BITS;
  constexpr int PAIRS = WORD_CODES / 2;
  UNROLL
  for (short i = 0; i < COUNT / WORD_CODES; i++) {
    UNROLL
    for (short j = 0; j < PAIRS; j++) {
      const uint pair = codes[i] >> (j * BITS);
      const half2 both = BITS == 8
                             ? as_type<half2>((pair & 0x00ff00ffu) ^ 0x64806480u) - half2(1152.0h)
                             : as_type<half2>((pair & 0x000f000fu) | 0x64006400u) - half2(1032.0h);
      values[i * WORD_CODES + j] = both.x;
      values[i * WORD_CODES + PAIRS + j] = both.y;
    }
  }
}

// The scale and the minimum of a group.
struct GroupScale {
  float scale;
  float minimum;  // kv_grouped
};

// 16 bytes of dequantised T, from `column` on.
template <int FORMAT, typename T, int COLUMNS>
METAL_FUNC uint4 dequantised_chunk(const device CacheElement<FORMAT>* tensor, Offset row,
                                   int column, GroupScale group) {
  constexpr int COUNT = chunk_elements<T>();
  const uint2 codes = load_codes<FORMAT, COLUMNS, COUNT>(tensor, row, column);
  uint4 chunk;
  thread T* values = reinterpret_cast<thread T*>(&chunk);
  UNROLL
  for (short i = 0; i < COUNT; i++) {
    const float value = number<FORMAT>(codes, i) * group.scale;
    values[i] = T(kv_grouped(FORMAT) ? value + group.minimum : value);
  }
  return chunk;
}
