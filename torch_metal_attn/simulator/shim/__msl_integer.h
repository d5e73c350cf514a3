// metal_integer.
#pragma once
#include <__msl_math.h>
#include <__msl_traits.h>

namespace metal {

// A function of the bits of each element, which are zero-extended.
#define __MSL_BITS(name, ...)                     \
  template <class T>                              \
  METAL_FUNC __integer<T> name(T x) {             \
    return __each<T>(                             \
        [](auto v) {                              \
          typedef make_unsigned_t<decltype(v)> U; \
          constexpr int width = sizeof(U) * 8;    \
          ulong bits = (U)v;                      \
          return (decltype(v))(__VA_ARGS__);      \
        },                                        \
        x);                                       \
  }
__MSL_BITS(clz, bits ? __builtin_clzl(bits) - (64 - width) : width)
__MSL_BITS(ctz, bits ? __builtin_ctzl(bits) : width)
__MSL_BITS(popcount, __builtin_popcountl(bits))
__MSL_BITS(reverse_bits, __builtin_bitreverse64(bits) >> (64 - width))
#undef __MSL_BITS
template <class T>
METAL_FUNC __integer<T> rotate(T x, T n) {
  return __each<T>(
      [](auto v, auto by) {
        typedef make_unsigned_t<decltype(v)> U;
        unsigned bits = sizeof(v) * 8, shift = (U)by % bits;
        return (decltype(v))(shift ? (U)((U)v << shift | (U)v >> (bits - shift)) : (U)v);
      },
      x, n);
}
template <class T>
METAL_FUNC __integer<T> extract_bits(T x, uint offset, uint bits) {
  return __each<T>(
      [=](auto v) {
        typedef decltype(v) V;
        typedef make_unsigned_t<V> U;
        if (bits == 0) return (V)0;
        unsigned left = sizeof(V) * 8 - bits - offset;
        return (V)((V)((U)v << left) >> (left + offset));
      },
      x);
}
template <class T>
METAL_FUNC __integer<T> insert_bits(T base, T insert, uint offset, uint bits) {
  return __each<T>(
      [=](auto b, auto v) {
        typedef make_unsigned_t<decltype(b)> U;
        U mask = bits == 0 ? 0 : (U)((U)((U) ~(U)0 >> (sizeof(U) * 8 - bits)) << offset);
        return (decltype(b))(((U)b & ~mask) | ((U)((U)v << offset) & mask));
      },
      base, insert);
}
template <class T>
METAL_FUNC __integer<T> mulhi(T x, T y) {
  return __each<T>(
      [](auto a, auto b) {
        typedef decltype(a) V;
        if constexpr (sizeof(V) < 4)
          return (V)((int)a * (int)b >> (sizeof(V) * 8));
        else if constexpr (sizeof(V) == 4)
          return (V)((conditional_t<__is_signed(V), long, ulong>)a * b >> 32);
        else
          return (V)((conditional_t<__is_signed(V), __int128, unsigned __int128>)a * b >> 64);
      },
      x, y);
}
template <class T>
METAL_FUNC __integer<T> madhi(T a, T b, T c) {
  return metal::mulhi(a, b) + c;
}
template <class T>
METAL_FUNC __integer<T> mad24(T a, T b, T c) {
  return a * b + c;
}
// The result is unsigned, as in the Metal specification.
template <class T>
METAL_FUNC auto absdiff(T x, T y) {
  typedef make_unsigned_t<__element<T>> U;
  return __each<__like<U, T>>([](U a, U b, bool is_more) { return is_more ? a - b : b - a; }, x, y,
                              x > y);
}
#define __MSL_OF_TWO(name, ...)            \
  template <class T>                       \
  METAL_FUNC __integer<T> name(T x, T y) { \
    return __VA_ARGS__;                    \
  }
__MSL_OF_TWO(mul24, x* y)
__MSL_OF_TWO(addsat, __builtin_elementwise_add_sat(x, y))
__MSL_OF_TWO(subsat, __builtin_elementwise_sub_sat(x, y))
// The mean, rounded down (hadd) or up (rhadd), without overflow.
__MSL_OF_TWO(hadd, (x & y) + ((x ^ y) >> 1))
__MSL_OF_TWO(rhadd, (x | y) - ((x ^ y) >> 1))
#undef __MSL_OF_TWO

}  // namespace metal
