// Functions that are private to Apple's headers, although public kernels call them. The flag asks
// for fast or precise math. Here both are precise.
#pragma once
#include <__msl_integer.h>
#include <__msl_simd.h>

#define __MSL_WITH_FLAG(name)                           \
  template <class A>                                    \
  METAL_FUNC auto __metal_##name(A a, bool) {           \
    return metal::name(a);                              \
  }                                                     \
  template <class A, class B>                           \
  METAL_FUNC auto __metal_##name(A a, B b, bool) {      \
    return metal::name(a, b);                           \
  }                                                     \
  template <class A, class B, class C>                  \
  METAL_FUNC auto __metal_##name(A a, B b, C c, bool) { \
    return metal::name(a, b, c);                        \
  }
__MSL_EACH_OF_4(__MSL_WITH_FLAG, acos, acosh, asin, asinh)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, atan, atanh, ceil, cos)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, cosh, cospi, exp, exp10)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, exp2, fabs, floor, fract)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, log, log10, log2, rint)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, round, rsqrt, sin, sinh)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, sinpi, sqrt, tan, tanh)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, tanpi, trunc, atan2, divide)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, fmax, fmin, fmod, pow)
__MSL_EACH_OF_4(__MSL_WITH_FLAG, powr, fmax3, fmin3, fmedian3)
__MSL_WITH_FLAG(ldexp)
#undef __MSL_WITH_FLAG

#define __MSL_SAME(name)                   \
  template <class... A>                    \
  METAL_FUNC auto __metal_##name(A... a) { \
    return metal::name(a...);              \
  }
__MSL_EACH_OF_4(__MSL_SAME, fma, frexp, nextafter, simd_broadcast)
__MSL_EACH_OF_4(__MSL_SAME, simd_shuffle, simd_shuffle_down, simd_shuffle_up, simd_shuffle_xor)
__MSL_SAME(simd_shuffle_rotate_down)
__MSL_SAME(simd_shuffle_rotate_up)
__MSL_SAME(simd_shuffle_and_fill_down)
__MSL_SAME(simd_shuffle_and_fill_up)
__MSL_EACH_OF_4(__MSL_SAME, simd_sum, simd_product, simd_max, simd_min)
__MSL_EACH_OF_4(__MSL_SAME, simd_xor, simd_and, simd_or, simd_prefix_inclusive_sum)
__MSL_SAME(simd_prefix_exclusive_sum)
__MSL_SAME(simd_prefix_inclusive_product)
__MSL_SAME(simd_prefix_exclusive_product)
#undef __MSL_SAME
template <class T>
METAL_FUNC T __metal_fract(T x) {
  return metal::fract(x);
}
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return MSL_SIMD_WIDTH; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return __msl_lane(); }

namespace metal {
// True for the types of SIMD operations: numbers of up to 32 bits. Texts add bfloat themselves.
template <class T>
struct __is_valid_simdgroup_type
    : bool_constant<(__is_same(__element<T>, float) || __is_same(__element<T>, half) ||
                     (__is_integral(__element<T>) && !__is_same(__element<T>, bool))) &&
                    sizeof(__element<T>) <= 4> {};
}  // namespace metal

template <class T>
struct _fp_encoding_traits;
template <>
struct _fp_encoding_traits<float> {
  static constexpr constant uint sign_mask = 0x80000000u, inf_mask = 0x7f800000u;
};
