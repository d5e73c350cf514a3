// The functions of metal_simdgroup, metal_quadgroup and metal_compute that attention uses, on a
// GPU. The simulator's header of this name has the same interface.
#pragma once
#include <__msl_engine.h>
#include <__msl_operations.h>

namespace metal {

METAL_FUNC void threadgroup_barrier(mem_flags flags) { __msl_threadgroup_barrier((uint)flags); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { __msl_simdgroup_barrier((uint)flags); }

// Applies `move` to each 32-bit word of a value.
template <class T, class F>
METAL_FUNC T __each_word(T x, F move) {
  constexpr int count = (sizeof(T) + 3) / 4;
  uint words[count] = {};
  __builtin_memcpy(words, &x, sizeof(T));
  _Pragma("unroll") for (int i = 0; i < count; ++i) words[i] = move(words[i]);
  __builtin_memcpy(&x, words, sizeof(T));
  return x;
}
#define __GPU_FROM_LANE(name)                                                   \
  template <class T>                                                            \
  METAL_FUNC T simd_##name(T x, ushort lane) {                                  \
    const uint from = __gpu_lane_of(lane & 31);                                 \
    return __each_word(x, [=](uint word) { return __gpu_##name(word, from); }); \
  }
__GPU_FROM_LANE(shuffle)
__GPU_FROM_LANE(broadcast)
#undef __GPU_FROM_LANE
template <class T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  // __gpu_lane_of permutes the bits of an index, so it maps a mask of these bits too.
  const uint moved = __gpu_lane_of(mask & 31);
  return __each_word(x, [=](uint word) { return __gpu_shuffle_xor(word, moved); });
}
template <template <class> class Op, class T>
METAL_FUNC T __reduce(T x) {
  _Pragma("unroll") for (ushort mask = 16; mask; mask >>= 1) x =
      Op<T>::apply(x, metal::simd_shuffle_xor(x, mask));
  return x;
}
#define __GPU_REDUCTION(name, op) \
  template <class T>              \
  METAL_FUNC T simd_##name(T x) { \
    return __reduce<op>(x);       \
  }
__GPU_REDUCTION(sum, __add)
__GPU_REDUCTION(max, __largest)
__GPU_REDUCTION(min, __smallest)
#undef __GPU_REDUCTION

template <class T>
METAL_FUNC T simd_prefix_inclusive_sum(T x) {
  const uint lane = __msl_lane();
  _Pragma("unroll") for (ushort delta = 1; delta < 32; delta <<= 1) {
    const T before = metal::simd_shuffle(x, (ushort)(lane - delta));
    if (lane >= delta) x += before;
  }
  return x;
}
template <class T>
METAL_FUNC T simd_prefix_exclusive_sum(T x) {
  const uint lane = __msl_lane();
  const T before = metal::simd_shuffle(metal::simd_prefix_inclusive_sum(x), (ushort)(lane - 1));
  return lane ? before : (T)0;
}

// Declared only because other headers name these functions; attention does not call them.
#define __GPU_UNUSED(name)          \
  template <class T, class... More> \
  T name(T x, More... more);
__GPU_UNUSED(simd_product)
__GPU_UNUSED(simd_and)
__GPU_UNUSED(simd_or)
__GPU_UNUSED(simd_xor)
__GPU_UNUSED(simd_shuffle_down)
__GPU_UNUSED(simd_shuffle_up)
__GPU_UNUSED(simd_shuffle_and_fill_up)
__GPU_UNUSED(simd_shuffle_and_fill_down)
__GPU_UNUSED(simd_shuffle_rotate_up)
__GPU_UNUSED(simd_shuffle_rotate_down)
__GPU_UNUSED(simd_prefix_inclusive_product)
__GPU_UNUSED(simd_prefix_exclusive_product)
#undef __GPU_UNUSED

}  // namespace metal
