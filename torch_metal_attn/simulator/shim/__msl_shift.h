// The rewriter's form of shifts in checked builds:
//   a << 16    a << __by<16>()
//   a << b     a << __checked << b
//   a <<= b    a <<= decltype(__amount_of(a)){} = b
#pragma once
#include <__msl_engine.h>
#include <__msl_types.h>

#ifdef MSL_UNDEFINED
namespace metal {

template <ulong amount>
struct __by {};
enum class __checked_shift {};
constexpr __checked_shift __checked{};
template <class T>
struct __shifted {
  T value;
};

#define __MSL_SHIFT(op)                                                              \
  template <class T, ulong amount>                                                   \
  METAL_FUNC constexpr auto operator op(T value, __by<amount>) {                     \
    if constexpr (__is_vector<T> && amount >= __width<T>) __check_amount<T>(amount); \
    return value op amount;                                                          \
  }                                                                                  \
  template <class T>                                                                 \
  METAL_FUNC constexpr __shifted<T> operator op(T value, __checked_shift) {          \
    return {value};                                                                  \
  }                                                                                  \
  template <class T, class Amount>                                                   \
  METAL_FUNC constexpr auto operator op(__shifted<T> a, Amount by) {                 \
    static_assert(__is_vector<T> || !__is_vector<Amount>,                            \
                  "a scalar cannot be shifted by a vector");                         \
    if constexpr (__is_vector<T>) __check_amount<T>(by);                             \
    return a.value op by;                                                            \
  }
__MSL_SHIFT(<<)
__MSL_SHIFT(>>)
#undef __MSL_SHIFT

template <class T>
struct __amount {
  template <class Amount>
  METAL_FUNC constexpr Amount operator=(Amount by) const {
    if constexpr (__is_vector<T>) __check_amount<T>(by);
    return by;
  }
};
template <class T>
__amount<T> __amount_of(T changed);

}  // namespace metal
#endif
