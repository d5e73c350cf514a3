// metal_math, metal_common, metal_geometric and metal_relational. Functions of 16-bit floats are
// computed in float32 and rounded.
#pragma once
#include <__msl_engine.h>

// The sign makes these no declarators, so `float INFINITY` is an error.
#define INFINITY (+__builtin_inff())
#define NAN (+__builtin_nanf(""))
#define HUGE_VALF INFINITY
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)9.765625e-04f)
#define MAXHALF ((half)65504.0f)
#define HUGE_VALH ((half)__builtin_inff())
#define HUGE_VALBF ((bfloat)__builtin_inff())
#define MAXBFLOAT ((bfloat)3.38953139e+38f)
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_10_EXP 4
#define HALF_MAX_EXP 16
#define HALF_MIN_10_EXP (-4)
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul
#define FP_ILOGB0 INT_MIN
#define FP_ILOGBNAN INT_MAX
#define __METAL_FAST_MATH__ 0
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_PRECISE_MATH__ 1

// build.py defines the constants of half and bfloat by these.
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

namespace metal {

template <class T>
constexpr bool __is_float_element =
    __is_same(__element<T>, float) || __is_same(__element<T>, half) ||
    __is_same(__element<T>, bfloat);
template <class T>
constexpr bool __is_integer_element = !__is_float_element<T> && __is_integral(__element<T>);

template <class T>
using __floating = enable_if_t<__is_float_element<T>, T>;
template <class T>
using __integer = enable_if_t<__is_integer_element<T>, T>;
template <class T>
using __number = enable_if_t<__is_float_element<T> || __is_integer_element<T>, T>;

// The type of an operation on A and B: both have this type, or one is a vector and the other a
// scalar of its element type. integers_convert: a scalar integer also converts to floating point.
template <class A, class B, bool integers_convert>
constexpr int __choose =
    __is_same(A, B)                                                                    ? 1
    : __is_vector<A> && __is_same(__element<A>, B)                                     ? 1
    : __is_vector<B> && __is_same(__element<B>, A)                                     ? 2
    : integers_convert && __is_float_element<A> && !__is_vector<B> && __is_integral(B) ? 1
    : integers_convert && __is_float_element<B> && !__is_vector<A> && __is_integral(A) ? 2
                                                                                       : 0;
template <class A, class B, int which>
struct __pick {};
template <class A, class B>
struct __pick<A, B, 1> {
  typedef A type;
};
template <class A, class B>
struct __pick<A, B, 2> {
  typedef B type;
};
template <class A, class B>
using __common = typename __pick<A, B, __choose<A, B, false>>::type;
template <class A, class B>
using __floating_common = __floating<typename __pick<A, B, __choose<A, B, true>>::type>;

// Computes 16-bit types in float32.
template <class T, class F, class... More>
METAL_FUNC T __in_float(F f, T x, More... more) {
  if constexpr (__is_same(__element<T>, float))
    return f(x, more...);
  else
    return __mk<T>(f(__mk<__like<float, T>>(x), __mk<__like<float, T>>(more)...));
}
// Applies `f` to each element. R has the length of T.
template <class R, class T, class F, class... More>
METAL_FUNC R __each(F f, T x, More... more) {
  if constexpr (__is_vector<T>) {
    R r;
    for (int i = 0; i < __length<T>; ++i)
      r[i] = (__element<R>)f((__element<T>)x[i], (__element<More>)more[i]...);
    return r;
  } else {
    return (R)f(x, more...);
  }
}
// Applies `f` to each element in float32.
template <class T, class F, class... More>
METAL_FUNC T __map(F f, T x, More... more) {
  return __each<T, T>([f](auto... v) { return f((float)v...); }, x, more...);
}

#define __MSL_UNARY(name)                                                         \
  template <class T>                                                              \
  METAL_FUNC __floating<T> name(T x) {                                            \
    return __in_float([](auto v) { return __builtin_elementwise_##name(v); }, x); \
  }
__MSL_EACH_OF_4(__MSL_UNARY, exp, exp2, log, log2)
__MSL_EACH_OF_4(__MSL_UNARY, log10, sin, cos, floor)
__MSL_EACH_OF_4(__MSL_UNARY, ceil, trunc, rint, round)
#undef __MSL_UNARY

#define __MSL_LIBM(name, ...)                                      \
  template <class T>                                               \
  METAL_FUNC __floating<T> name(T x) {                             \
    return __map([](float v) -> float { return __VA_ARGS__; }, x); \
  }
#define __MSL_BUILT_IN(name) __MSL_LIBM(name, __builtin_##name##f(v))
__MSL_EACH_OF_4(__MSL_BUILT_IN, asin, acos, atan, tan)
__MSL_EACH_OF_4(__MSL_BUILT_IN, sinh, cosh, tanh, asinh)
__MSL_BUILT_IN(acosh)
__MSL_BUILT_IN(atanh)
__MSL_BUILT_IN(sqrt)
#undef __MSL_BUILT_IN
#if __has_builtin(__builtin_exp10f)
__MSL_LIBM(exp10, __builtin_exp10f(v))
#else  // clang 17
__MSL_LIBM(exp10, __builtin_powf(10.0f, v))
#endif
__MSL_LIBM(sinpi, __builtin_sinf(M_PI_F*(v - 2.0f * __builtin_rintf(0.5f * v))))
__MSL_LIBM(cospi, __builtin_cosf(M_PI_F*(v - 2.0f * __builtin_rintf(0.5f * v))))
__MSL_LIBM(tanpi, __builtin_tanf(M_PI_F*(v - __builtin_rintf(v))))
#undef __MSL_LIBM

template <class T>
METAL_FUNC __floating<T> rsqrt(T x) {
  return __map([](float v) -> float { return 1.0f / __builtin_sqrtf(v); }, x);
}
template <class T>
METAL_FUNC __number<T> abs(T x) {
  if constexpr (__is_integer_element<T> && __is_unsigned(__element<T>))
    return x;
  else
    return __builtin_elementwise_abs(x);
}
template <class T>
METAL_FUNC __floating<T> fabs(T x) {
  return __builtin_elementwise_abs(x);
}

// If one operand is NaN, the other is the result. In clang 19 and older, max and min do this.
#if __has_builtin(__builtin_elementwise_maxnum)
#define __MSL_MAXNUM __builtin_elementwise_maxnum
#define __MSL_MINNUM __builtin_elementwise_minnum
#else
#define __MSL_MAXNUM __builtin_elementwise_max
#define __MSL_MINNUM __builtin_elementwise_min
#endif
// Bools are promoted to ints.
template <class T>
using __promoted = typename __pick<T, int, __is_same(T, bool) ? 2 : 1>::type;
#define __MSL_EXTREME(name, common, for_float, for_integer)       \
  template <class A, class B, class T = __promoted<common<A, B>>> \
  METAL_FUNC T name(A x, B y) {                                   \
    T a = (T)x, b = (T)y;                                         \
    if constexpr (__is_float_element<T>)                          \
      return for_float(a, b);                                     \
    else                                                          \
      return for_integer(a, b);                                   \
  }
__MSL_EXTREME(max, __common, __MSL_MAXNUM, __builtin_elementwise_max)
__MSL_EXTREME(min, __common, __MSL_MINNUM, __builtin_elementwise_min)
__MSL_EXTREME(fmax, __floating_common, __MSL_MAXNUM, __builtin_elementwise_max)
__MSL_EXTREME(fmin, __floating_common, __MSL_MINNUM, __builtin_elementwise_min)
#undef __MSL_EXTREME
#undef __MSL_MAXNUM
#undef __MSL_MINNUM
#define __MSL_OF_THREE(name, result, ...)    \
  template <class T>                         \
  METAL_FUNC result<T> name(T a, T b, T c) { \
    return __VA_ARGS__;                      \
  }
__MSL_OF_THREE(max3, __number, metal::max(metal::max(a, b), c))
__MSL_OF_THREE(min3, __number, metal::min(metal::min(a, b), c))
__MSL_OF_THREE(median3, __number, metal::max(metal::min(a, b), metal::min(metal::max(a, b), c)))
__MSL_OF_THREE(fmax3, __floating, metal::max3(a, b, c))
__MSL_OF_THREE(fmin3, __floating, metal::min3(a, b, c))
__MSL_OF_THREE(fmedian3, __floating, metal::median3(a, b, c))
#undef __MSL_OF_THREE
template <class A, class B, class C, class T = __floating_common<__floating_common<A, B>, C>>
METAL_FUNC T fma(A a, B b, C c) {
  return __builtin_elementwise_fma((T)a, (T)b, (T)c);
}
template <class X, class A, class B, class T = __common<__common<X, A>, B>>
METAL_FUNC T clamp(X x, A low, B high) {
#ifdef MSL_UNDEFINED
  if (!__builtin_is_constant_evaluated()) {
    if constexpr (__is_vector<T>) {
      if (__builtin_reduce_or((T)low > (T)high)) __msl_refuse_clamp();
    } else {
      if ((T)low > (T)high) __msl_refuse_clamp();
    }
  }
#endif
  return metal::min(metal::max((T)x, (T)low), (T)high);
}
template <class T>
METAL_FUNC __floating<T> saturate(T x) {
  return metal::min(metal::max(x, (T)(__element<T>)0), (T)(__element<T>)1);
}

#define __MSL_BINARY(name, ...)                                                \
  template <class A, class B, class T = __floating_common<A, B>>               \
  METAL_FUNC T name(A x, B y) {                                                \
    return __in_float([](auto a, auto b) { return __VA_ARGS__; }, (T)x, (T)y); \
  }
__MSL_BINARY(pow, __builtin_elementwise_pow(a, b))
__MSL_BINARY(powr, __builtin_elementwise_pow(a, b))
__MSL_BINARY(divide, a / b)
#undef __MSL_BINARY
#define __MSL_BINARY(name, ...)                                                      \
  template <class A, class B, class T = __floating_common<A, B>>                     \
  METAL_FUNC T name(A x, B y) {                                                      \
    return __map([](float a, float b) -> float { return __VA_ARGS__; }, (T)x, (T)y); \
  }
__MSL_BINARY(fdim, a > b ? a - b : a != a || b != b ? a + b : 0.0f)
__MSL_BINARY(atan2, __builtin_atan2f(a, b))
__MSL_BINARY(fmod, __builtin_fmodf(a, b))
#undef __MSL_BINARY
template <class T>
METAL_FUNC __floating<T> copysign(T a, T b) {
  return __builtin_elementwise_copysign(a, b);
}
template <class T>
METAL_FUNC __floating<T> fract(T x) {
  return metal::min(x - metal::floor(x),
                    (T)(__element<T>)(1.0f - (__is_same(__element<T>, float)  ? 0x1p-24f
                                              : __is_same(__element<T>, half) ? 0x1p-11f
                                                                              : 0x1p-8f)));
}
template <class T>
METAL_FUNC __floating<T> fract(T x, T& whole) {
  whole = metal::floor(x);
  return metal::fract(x);
}
template <class T>
METAL_FUNC __floating<T> modf(T x, T& whole) {
  whole = metal::trunc(x);
  return metal::copysign(x - whole, x);
}
template <class T>
METAL_FUNC __floating<T> ldexp(T x, __like<int, T> exponent) {
  return __each<T>([](float v, int e) { return __builtin_ldexpf(v, e); }, x, exponent);
}
template <class T>
METAL_FUNC __floating<T> frexp(T x, __like<int, T>& exponent) {
  exponent = __each<__like<int, T>>(
      [](float v) {
        int e;
        __builtin_frexpf(v, &e);
        return e;
      },
      x);
  return metal::ldexp(x, -exponent);
}
template <class T>
METAL_FUNC __floating<T> frexp(T x, __like<int, T>* exponent) {
  return metal::frexp(x, *exponent);
}
template <class T>
METAL_FUNC __like<int, __floating<T>> ilogb(T x) {
  return __each<__like<int, T>>([](float v) { return __builtin_ilogbf(v); }, x);
}
// The value of T that follows x in the direction of y.
template <class T>
METAL_FUNC T __next(T x, T y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  typedef __bits<T> Bits;
  Bits bits = __builtin_bit_cast(Bits, x);
  if ((float)x == 0.0f)
    return __builtin_bit_cast(T, (Bits)((float)y < 0.0f ? (Bits)1 << (sizeof(T) * 8 - 1) | 1 : 1));
  bool away = ((float)x < (float)y) == ((float)x > 0.0f);
  return __builtin_bit_cast(T, (Bits)(away ? bits + 1 : bits - 1));
}
template <class T>
METAL_FUNC __floating<T> nextafter(T x, T y) {
  return __each<T>([](auto a, auto b) { return __next(a, b); }, x, y);
}
template <class T>
METAL_FUNC __floating<T> sincos(T x, T& cosine) {
  cosine = metal::cos(x);
  return metal::sin(x);
}
template <class T>
METAL_FUNC __floating<T> sign(T x) {
  return __map([](float v) -> float { return v > 0    ? 1.0f
                                             : v < 0  ? -1.0f
                                             : v != v ? 0.0f
                                                      : v; },
               x);
}
template <class X, class Y, class A, class T = __floating_common<__floating_common<X, Y>, A>>
METAL_FUNC T mix(X x, Y y, A a) {
  return (T)x + ((T)y - (T)x) * (T)a;
}
template <class A, class B, class T = __floating_common<A, B>>
METAL_FUNC T step(A edge, B x) {
  return __map([](float e, float v) -> float { return v < e ? 0.0f : 1.0f; }, (T)edge, (T)x);
}
template <class A, class B, class C, class T = __floating_common<__floating_common<A, B>, C>>
METAL_FUNC T smoothstep(A low, B high, C x) {
  T t = metal::saturate(((T)x - (T)low) / ((T)high - (T)low));
  return t * t * ((T)(__element<T>)3 - (T)(__element<T>)2 * t);
}

// Relational functions return bool, or a vector of bool.
#define __MSL_RELATION(name, ...)                                              \
  template <class T>                                                           \
  METAL_FUNC __like<bool, __floating<T>> name(T value) {                       \
    return __each<__like<bool, T>>([](auto x) { return __VA_ARGS__; }, value); \
  }
__MSL_RELATION(isnan, x != x)
__MSL_RELATION(isinf, __builtin_isinf((float)x) != 0)
__MSL_RELATION(isfinite, __builtin_isfinite((float)x) != 0)
__MSL_RELATION(isnormal, __builtin_isnormal((float)x) != 0)
__MSL_RELATION(signbit, __builtin_signbit((float)x) != 0)
#undef __MSL_RELATION
template <class T>
METAL_FUNC bool isunordered(T a, T b) {
  return a != a || b != b;
}
template <class T>
METAL_FUNC bool isordered(T a, T b) {
  return a == a && b == b;
}
// A mask is a vector of bool, or the result of comparing two vectors, with all bits set for true.
#define __MSL_OF_MASK(name, start, op)                             \
  template <class M>                                               \
  METAL_FUNC bool name(M mask) {                                   \
    if constexpr (__is_vector<M>) {                                \
      bool r = start;                                              \
      for (int i = 0; i < __length<M>; ++i) r op## = mask[i] != 0; \
      return r;                                                    \
    } else {                                                       \
      return mask;                                                 \
    }                                                              \
  }
__MSL_OF_MASK(any, false, |)
__MSL_OF_MASK(all, true, &)
#undef __MSL_OF_MASK
template <class A, class B, class M, class T = __common<A, B>>
METAL_FUNC T select(A a, B b, M mask) {
  T x = (T)a, y = (T)b;
  if constexpr (__is_vector<M>) {
    static_assert(__length<M> == __length<T>, "select needs one mask value for each element");
    for (int i = 0; i < __length<T>; ++i) x[i] = mask[i] ? y[i] : x[i];
    return x;
  } else {
    return mask ? y : x;
  }
}

template <class T>
METAL_FUNC __element<T> __dot(T a, T b) {
  __element<T> total = a[0] * b[0];
  for (int i = 1; i < __length<T>; ++i) total += a[i] * b[i];
  return total;
}
template <class T>
METAL_FUNC __element<__floating<T>> dot(T a, T b) {
  static_assert(__is_vector<T>, "dot takes vectors");
  return __dot(a, b);
}
// Metal's functions are not templates. So they are preferred over a template of the same name in a
// text. MLX defines such functions for bfloat itself.
#define __MSL_FIRST(T)                                               \
  METAL_FUNC T pow(T x, T y) { return metal::pow<T, T>(x, y); }      \
  METAL_FUNC T dot(vec<T, 2> a, vec<T, 2> b) { return __dot(a, b); } \
  METAL_FUNC T dot(vec<T, 3> a, vec<T, 3> b) { return __dot(a, b); } \
  METAL_FUNC T dot(vec<T, 4> a, vec<T, 4> b) { return __dot(a, b); }
__MSL_FIRST(half)
__MSL_FIRST(float)
#undef __MSL_FIRST
template <class T>
METAL_FUNC __element<__floating<T>> length_squared(T a) {
  return __dot(a, a);
}
template <class T>
METAL_FUNC __element<__floating<T>> length(T a) {
  return metal::sqrt(__dot(a, a));
}
template <class T>
METAL_FUNC __element<__floating<T>> distance(T a, T b) {
  return metal::length(a - b);
}
template <class T>
METAL_FUNC __element<__floating<T>> distance_squared(T a, T b) {
  return __dot(a - b, a - b);
}
template <class T>
METAL_FUNC __floating<T> normalize(T a) {
  return a * metal::rsqrt(__dot(a, a));
}
template <class T>
METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

#define __MSL_BOTH                                                                                 \
  using metal::abs, metal::acos, metal::acosh, metal::asin, metal::asinh, metal::atan,             \
      metal::atan2, metal::atanh, metal::ceil, metal::clamp, metal::copysign, metal::cos,          \
      metal::cosh, metal::cospi, metal::divide, metal::exp, metal::exp10, metal::exp2,             \
      metal::fabs, metal::fdim, metal::floor, metal::fma, metal::fmax, metal::fmax3,               \
      metal::fmedian3, metal::fmin, metal::fmin3, metal::fmod, metal::fract, metal::frexp,         \
      metal::isfinite, metal::isinf, metal::isnan, metal::ldexp, metal::length, metal::log,        \
      metal::log10, metal::log2, metal::max, metal::max3, metal::median3, metal::min, metal::min3, \
      metal::mix, metal::modf, metal::normalize, metal::pow, metal::powr, metal::rint,             \
      metal::round, metal::rsqrt, metal::saturate, metal::sign, metal::sin, metal::sincos,         \
      metal::sinh, metal::sinpi, metal::smoothstep, metal::sqrt, metal::step, metal::tan,          \
      metal::tanh, metal::tanpi, metal::trunc;
namespace fast {
__MSL_BOTH
}
namespace precise {
__MSL_BOTH
}
#undef __MSL_BOTH

}  // namespace metal
