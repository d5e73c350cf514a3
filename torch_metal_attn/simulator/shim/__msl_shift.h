// What checked builds make of shifts: `a << 9` is `a << __by<9>()`, `a << b` is
// `a << __checked << b`, and `a <<= b` is `a <<= decltype(__amount_of(a)){} = b`.
#pragma once
#include <__msl_engine.h>
#include <__msl_types.h>

#ifdef MSL_UNDEFINED
namespace metal {

template <ulong amount>
struct __by {};
template <class T, ulong amount>
METAL_FUNC constexpr auto operator<<(T value, __by<amount>) {
  if constexpr (__is_vector<T> && amount >= 8 * sizeof(__element<T>)) __check_amount<T>(amount);
  return value << amount;
}
template <class T, ulong amount>
METAL_FUNC constexpr auto operator>>(T value, __by<amount>) {
  if constexpr (__is_vector<T> && amount >= 8 * sizeof(__element<T>)) __check_amount<T>(amount);
  return value >> amount;
}

enum class __checked_shift {};
constexpr __checked_shift __checked{};
template <class T>
struct __shifted {
  T value;
};
template <class T>
METAL_FUNC constexpr __shifted<T> operator<<(T value, __checked_shift) {
  return {value};
}
template <class T>
METAL_FUNC constexpr __shifted<T> operator>>(T value, __checked_shift) {
  return {value};
}
template <class T, class Amount>
METAL_FUNC constexpr auto operator<<(__shifted<T> a, Amount by) {
  if constexpr (__is_vector<T>) __check_amount<T>(by);
  return a.value << by;
}
template <class T, class Amount>
METAL_FUNC constexpr auto operator>>(__shifted<T> a, Amount by) {
  if constexpr (__is_vector<T>) __check_amount<T>(by);
  return a.value >> by;
}

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
