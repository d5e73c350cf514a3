// Permutations that a seed chooses.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Where the seed's permutation of 0 .. count - 1 maps `value`. A Feistel network permutes the
// numbers below the next power of four, and is repeated until the result is below count.
inline uint64_t shuffled(uint64_t value, uint64_t count, uint64_t seed) {
  unsigned half = 1;
  while (half < 32 && (uint64_t{1} << (2 * half)) < count) ++half;
  uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      uint64_t next = left ^ (mix(right ^ mix(seed + round)) & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= count);
  return value;
}

}  // namespace metal_attn::simulator
