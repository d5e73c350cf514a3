// Functions private to Apple's own headers that public kernels call all the same. The flag asks for
// fast or precise math; here both are precise.
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
__MSL_WITH_FLAG(acos)
__MSL_WITH_FLAG(acosh)
__MSL_WITH_FLAG(asin)
__MSL_WITH_FLAG(asinh)
__MSL_WITH_FLAG(atan)
__MSL_WITH_FLAG(atanh)
__MSL_WITH_FLAG(ceil)
__MSL_WITH_FLAG(cos)
__MSL_WITH_FLAG(cosh)
__MSL_WITH_FLAG(cospi)
__MSL_WITH_FLAG(exp)
__MSL_WITH_FLAG(exp10)
__MSL_WITH_FLAG(exp2)
__MSL_WITH_FLAG(fabs)
__MSL_WITH_FLAG(floor)
__MSL_WITH_FLAG(fract)
__MSL_WITH_FLAG(log)
__MSL_WITH_FLAG(log10)
__MSL_WITH_FLAG(log2)
__MSL_WITH_FLAG(rint)
__MSL_WITH_FLAG(round)
__MSL_WITH_FLAG(rsqrt)
__MSL_WITH_FLAG(sin)
__MSL_WITH_FLAG(sinh)
__MSL_WITH_FLAG(sinpi)
__MSL_WITH_FLAG(sqrt)
__MSL_WITH_FLAG(tan)
__MSL_WITH_FLAG(tanh)
__MSL_WITH_FLAG(tanpi)
__MSL_WITH_FLAG(trunc)
__MSL_WITH_FLAG(atan2)
__MSL_WITH_FLAG(divide)
__MSL_WITH_FLAG(fmax)
__MSL_WITH_FLAG(fmin)
__MSL_WITH_FLAG(fmod)
__MSL_WITH_FLAG(pow)
__MSL_WITH_FLAG(powr)
__MSL_WITH_FLAG(fmax3)
__MSL_WITH_FLAG(fmin3)
__MSL_WITH_FLAG(fmedian3)
__MSL_WITH_FLAG(ldexp)
#undef __MSL_WITH_FLAG

#define __MSL_SAME(name)                   \
  template <class... A>                    \
  METAL_FUNC auto __metal_##name(A... a) { \
    return metal::name(a...);              \
  }
__MSL_SAME(fma)
__MSL_SAME(frexp)
__MSL_SAME(nextafter)
__MSL_SAME(simd_broadcast)
__MSL_SAME(simd_shuffle)
__MSL_SAME(simd_shuffle_down)
__MSL_SAME(simd_shuffle_up)
__MSL_SAME(simd_shuffle_xor)
__MSL_SAME(simd_shuffle_rotate_down)
__MSL_SAME(simd_shuffle_rotate_up)
__MSL_SAME(simd_shuffle_and_fill_down)
__MSL_SAME(simd_shuffle_and_fill_up)
__MSL_SAME(simd_sum)
__MSL_SAME(simd_product)
__MSL_SAME(simd_max)
__MSL_SAME(simd_min)
__MSL_SAME(simd_xor)
__MSL_SAME(simd_and)
__MSL_SAME(simd_or)
__MSL_SAME(simd_prefix_inclusive_sum)
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
// True if SIMD operations take the type: a number of up to 32 bits. Texts have bfloat by
// themselves.
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
