// The types that kernel parameters point to. The host checks its arguments against them.
#pragma once
#include <__msl_atomic.h>
#include <__msl_packed.h>
#include <__msl_traits.h>

namespace metal {

// A scalar's index in SCALARS of parameter_types.py, and 0 for every other type.
template <class T>
constexpr uchar __scalar_number = 0;
#define __MSL_NUMBER(T, number) \
  template <>                   \
  constexpr uchar __scalar_number<T> = number;
__MSL_NUMBER(bool, 1)
__MSL_NUMBER(char, 2)
__MSL_NUMBER(int8_t, 2)
__MSL_NUMBER(uchar, 3)
__MSL_NUMBER(short, 4)
__MSL_NUMBER(ushort, 5)
__MSL_NUMBER(int, 6)
__MSL_NUMBER(uint, 7)
__MSL_NUMBER(long, 8)
__MSL_NUMBER(ulong, 9)
__MSL_NUMBER(half, 10)
__MSL_NUMBER(bfloat, 11)
__MSL_NUMBER(float, 12)
#undef __MSL_NUMBER

// The scalar that a type consists of: the type of a vector's elements or of an atomic's value.
template <class T>
struct __scalar_of {
  typedef __element<T> type;
};
template <class T>
struct __scalar_of<__packed3<T>> {
  typedef T type;
};
template <int N>
struct __scalar_of<__bools<N>> {
  typedef bool type;
};
template <class T>
struct __scalar_of<_atomic<T>> {
  typedef T type;
};

// 0 for a type without a size.
template <class T, class = void>
constexpr uint __bytes_of = 0;
template <class T>
constexpr uint __bytes_of<T, decltype((void)sizeof(T))> = sizeof(T);

struct __parameter_type {
  uint bytes;           // of the type that the parameter points to
  uint unpadded_bytes;  // less the padding of a three-element vector
  uchar scalar;
  bool is_reference;
  bool exists;  // false if the function constants remove the parameter
};
template <class P>
constexpr __parameter_type __parameter_type_of(bool exists) {
  typedef __remove_pointer(__remove_reference_t(P)) Pointee;
  typedef __remove_all_extents(Pointee) Element;
  typedef remove_cv_t<Element> Value;
  typedef typename __scalar_of<Value>::type Scalar;
  const uint bytes = __bytes_of<Pointee>;
  const uint unpadded = __is_vector<Value> ? __length<Value> * __bytes_of<Scalar> : bytes;
  return {bytes, unpadded, __scalar_number<Scalar>, __is_reference(P), exists};
}

}  // namespace metal
