// Functions private to Apple's own headers that public kernels call all the same. The flag asks for
// fast or precise math; here both are precise.
#pragma once
#include <__msl_integer.h>
#include <__msl_simd.h>

#define __MSL_1(name)                      \
  template <class T>                       \
  METAL_FUNC T __metal_##name(T x, bool) { \
    return metal::name(x);                 \
  }
__MSL_1(acos)
__MSL_1(acosh)
__MSL_1(asin)
__MSL_1(asinh)
__MSL_1(atan)
__MSL_1(atanh)
__MSL_1(ceil)
__MSL_1(cos)
__MSL_1(cosh)
__MSL_1(cospi)
__MSL_1(exp)
__MSL_1(exp10)
__MSL_1(exp2)
__MSL_1(fabs)
__MSL_1(floor)
__MSL_1(fract)
__MSL_1(log)
__MSL_1(log10)
__MSL_1(log2)
__MSL_1(rint)
__MSL_1(round)
__MSL_1(rsqrt)
__MSL_1(sin)
__MSL_1(sinh)
__MSL_1(sinpi)
__MSL_1(sqrt)
__MSL_1(tan)
__MSL_1(tanh)
__MSL_1(tanpi)
__MSL_1(trunc)
#undef __MSL_1

#define __MSL_2(name)                           \
  template <class T>                            \
  METAL_FUNC T __metal_##name(T x, T y, bool) { \
    return metal::name(x, y);                   \
  }
__MSL_2(atan2)
__MSL_2(divide)
__MSL_2(fmax)
__MSL_2(fmin)
__MSL_2(fmod)
__MSL_2(pow)
__MSL_2(powr)
#undef __MSL_2

#define __MSL_3(name)                                \
  template <class T>                                 \
  METAL_FUNC T __metal_##name(T x, T y, T z, bool) { \
    return metal::name(x, y, z);                     \
  }
__MSL_3(fmax3)
__MSL_3(fmin3)
__MSL_3(fmedian3)
#undef __MSL_3

template <class T>
METAL_FUNC T __metal_fma(T x, T y, T z) {
  return metal::fma(x, y, z);
}
template <class T>
METAL_FUNC T __metal_fract(T x) {
  return metal::fract(x);
}
template <class T>
METAL_FUNC T __metal_frexp(T x, int* exponent) {
  return metal::frexp(x, *exponent);
}
template <class T>
METAL_FUNC T __metal_ldexp(T x, int exponent, bool) {
  return metal::ldexp(x, exponent);
}
template <class T>
METAL_FUNC T __metal_nextafter(T x, T y) {
  return metal::nextafter(x, y);
}

#define __MSL_LANE(name)                          \
  template <class T>                              \
  METAL_FUNC T __metal_##name(T x, ushort lane) { \
    return metal::name(x, lane);                  \
  }
__MSL_LANE(simd_broadcast)
__MSL_LANE(simd_shuffle)
__MSL_LANE(simd_shuffle_down)
__MSL_LANE(simd_shuffle_up)
__MSL_LANE(simd_shuffle_xor)
__MSL_LANE(simd_shuffle_rotate_down)
__MSL_LANE(simd_shuffle_rotate_up)
#undef __MSL_LANE
template <class T>
METAL_FUNC T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(x, fill, delta, modulo);
}
template <class T>
METAL_FUNC T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(x, fill, delta, modulo);
}
#define __MSL_GROUP(name)            \
  template <class T>                 \
  METAL_FUNC T __metal_##name(T x) { \
    return metal::name(x);           \
  }
__MSL_GROUP(simd_sum)
__MSL_GROUP(simd_product)
__MSL_GROUP(simd_max)
__MSL_GROUP(simd_min)
__MSL_GROUP(simd_xor)
__MSL_GROUP(simd_and)
__MSL_GROUP(simd_or)
__MSL_GROUP(simd_prefix_inclusive_sum)
__MSL_GROUP(simd_prefix_exclusive_sum)
__MSL_GROUP(simd_prefix_inclusive_product)
__MSL_GROUP(simd_prefix_exclusive_product)
#undef __MSL_GROUP
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return MSL_SIMD_WIDTH; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return __msl_lane(); }

template <class T>
struct _fp_encoding_traits;
template <>
struct _fp_encoding_traits<float> {
  static constexpr constant uint sign_mask = 0x80000000u, inf_mask = 0x7f800000u;
};
