// metal_uniform: values that all threads share. Here a uniform only wraps its value.
#pragma once
#include <__msl_types.h>

namespace metal {

template <class T>
struct uniform;
template <class T>
constexpr uniform<T> make_uniform(T value);

template <class T>
struct uniform {
  typedef T value_type;
  uniform() = default;
  constexpr operator T() const { return value; }

#define __MSL_OPERATOR(op)                                     \
  friend constexpr auto operator op(uniform a, uniform b) {    \
    return make_uniform((__remove_cv(T))(a.value op b.value)); \
  }
  __MSL_EACH_OF_4(__MSL_OPERATOR, +, -, *, /)
  __MSL_EACH_OF_4(__MSL_OPERATOR, %, &, |, ^)
#undef __MSL_OPERATOR

 private:
  template <class U>
  friend constexpr uniform<U> make_uniform(U);
  explicit constexpr uniform(T v) : value(v) {}
  T value;
};
template <class T>
constexpr uniform<T> make_uniform(T value) {
  return uniform<T>(value);
}

}  // namespace metal
