// Dequantises K and V in registers. The formats are those of torch_metal_attn/quantisation.py.
#pragma once

#include "features.h"
#include "params.h"
#include "tile.h"

// The elements of K and V in memory: bytes of any number of codes if they are quantised, and
// ELEMENT unless the host defines another, as for float32 queries on a half precision cache.
#if KV_FORMAT
#define KV_ELEMENT uchar
#elif !defined(KV_ELEMENT)
#define KV_ELEMENT ELEMENT
#endif

// The elements of their tiles and fragments: codes become ELEMENT as they are read, all others stay
// as they are, because the matrix unit multiplies float by half and by bfloat.
using KvTileElement = conditional_t<QUANTISED, ELEMENT, KV_ELEMENT>;

#define KV_BLOCK_SCALES (KV_FORMAT == KV_Q8_0 || KV_FORMAT == KV_Q4_0)
using KV_SCALE_ELEMENT = conditional_t<KV_BLOCK_SCALES, half, float>;

constant constexpr int KV_BITS = KV_FORMAT == KV_Q4_0 ? 4 : 8;

// The codes of COUNT neighbouring columns, the first in the lowest bits; 0 for columns from COLUMNS
// on. Rows that do not start at a multiple of such a load are read byte by byte.
template <int COLUMNS, int COUNT>
METAL_FUNC uint2 load_codes(const device KV_ELEMENT* tensor, Offset row, int column) {
  constexpr int BYTES = COUNT * KV_BITS / 8;
  const device uchar* first =
      reinterpret_cast<const device uchar*>(tensor) + (row + column * KV_BITS / 8);
  if (WIDE_LOADS && BYTES == 8) {
    return *reinterpret_cast<const device uint2*>(first);
  }
  if (WIDE_LOADS && BYTES == 4) {
    return uint2(*reinterpret_cast<const device uint*>(first), 0);
  }
  if (WIDE_LOADS) {
    return uint2(*reinterpret_cast<const device ushort*>(first), 0);
  }
  uint2 codes = uint2(0);
  UNROLL
  for (short i = 0; i < BYTES; i++) {
    if (COLUMNS % FRAGMENT == 0 || column + i < COLUMNS) {
      codes[i / 4] |= uint(first[i]) << (i % 4 * 8);
    }
  }
  return codes;
}

// A float8 of 4 bits of exponent and 3 of fraction: Micikevicius et al., "FP8 Formats for Deep
// Learning" (2022). Below 2^-6 it counts steps of 2^-9; a conversion through denormals would flush
// those to 0.
METAL_FUNC float e4m3(uint code) {
  const uint magnitude = code & 0x7f;
  const float normal = as_type<float>((magnitude << 20) + (120u << 23));
  const float finite = magnitude < 8 ? float(magnitude) * 0.001953125f : normal;
  const float value = magnitude == 0x7f ? NAN : finite;
  return (code & 0x80) != 0 ? -value : value;
}

// The number of code i, before it is scaled.
METAL_FUNC float number(uint2 codes, short i) {
  const uint code = codes[i * KV_BITS / 32] >> (i * KV_BITS % 32);
  if (KV_FORMAT == KV_Q8_0) {
    return float(as_type<char>(uchar(code & 0xff)));
  }
  if (KV_FORMAT == KV_Q4_0) {
    return float(int(code & 15) - 8);
  }
  return e4m3(code);
}

// The numbers of COUNT codes, before they are scaled, exactly.
template <typename T, int COUNT>
METAL_FUNC void expand(thread T* values, uint2 codes, thread const T*) {
  UNROLL
  for (short i = 0; i < COUNT; i++) {
    values[i] = T(number(codes, i));
  }
}

// To half two at a time, without conversions: 0x6400 with n in its lowest bits is 1024 + n.
template <typename T, int COUNT>
METAL_FUNC void expand(thread half* values, uint2 codes, thread const half*) {
  constexpr int WORD_CODES = 32 / KV_BITS;
  constexpr int PAIRS = WORD_CODES / 2;
  UNROLL
  for (short i = 0; i < COUNT / WORD_CODES; i++) {
    UNROLL
    for (short j = 0; j < PAIRS; j++) {
      const uint pair = codes[i] >> (j * KV_BITS);
      const half2 both = KV_BITS == 8
                             ? as_type<half2>((pair & 0x00ff00ffu) ^ 0x64806480u) - half2(1152.0h)
                             : as_type<half2>((pair & 0x000f000fu) | 0x64006400u) - half2(1032.0h);
      values[i * WORD_CODES + j] = both.x;
      values[i * WORD_CODES + PAIRS + j] = both.y;
    }
  }
}

// 16 bytes of T of a row of COLUMNS columns, from `column` on, and 0 behind its end.
template <typename T, int COLUMNS>
METAL_FUNC uint4 dequantised_chunk(const device KV_ELEMENT* tensor, Offset row, int column,
                                   float scale) {
  constexpr int COUNT = chunk_elements<T>();
  const uint2 codes = load_codes<COLUMNS, COUNT>(tensor, row, column);
  uint4 chunk;
  thread T* values = reinterpret_cast<thread T*>(&chunk);
  UNROLL
  for (short i = 0; i < COUNT; i++) {
    values[i] = T(number(codes, i) * scale);
  }
  return chunk;
}
