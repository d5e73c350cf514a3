// metal_packed_vector: vectors that need no more alignment than an element.
#pragma once
#include <__msl_types.h>

namespace metal {

// Three floats take twelve bytes. clang's own vectors cannot do this: their size is a power of
// two. Whole stores to device and threadgroup memory go through `__target`.
template <class T>
struct __packed3 {
  T x, y, z;
  constexpr __packed3() : x(), y(), z() {}
  constexpr __packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  explicit constexpr __packed3(T a) : x(a), y(a), z(a) {}
  constexpr __packed3(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  constexpr __packed3(const __packed3&) = default;
  constexpr __packed3(const device __packed3& o) : x(o.x), y(o.y), z(o.z) {}
  constexpr __packed3(const threadgroup __packed3& o) : x(o.x), y(o.y), z(o.z) {}
  constexpr __packed3(constant __packed3& o) : x(o.x), y(o.y), z(o.z) {}
  __packed3& operator=(const __packed3&) = default;
  constexpr operator vec<T, 3>() const { return vec<T, 3>{x, y, z}; }
  // The index of an array is checked.
  T& operator[](int i) { return reinterpret_cast<T(&)[3]>(x)[i]; }
  constexpr T operator[](int i) const { return vec<T, 3>{x, y, z}[i]; }
};
template <class T>
METAL_FUNC constexpr vec<T, 3> __unpack(__packed3<T> a) {
  return vec<T, 3>{a.x, a.y, a.z};
}
template <class V, class T>
METAL_FUNC constexpr V __mk(__packed3<T> a) {
  return __mk<V>(__unpack(a));
}

// Operands are converted to vectors first. They are passed by value, so they may be in any memory.
template <class A>
using __operand = enable_if_t<__is_vector<A> || __is_arithmetic(A) ||
                                  __are_16_bit_floats<A, half> || __are_16_bit_floats<A, bfloat>,
                              A>;
#define __MSL_PACKED_BINARY(op)                                           \
  template <class T>                                                      \
  METAL_FUNC constexpr auto operator op(__packed3<T> a, __packed3<T> b) { \
    return __unpack(a) op __unpack(b);                                    \
  }                                                                       \
  template <class T, class B, class = __operand<B>>                       \
  METAL_FUNC constexpr auto operator op(__packed3<T> a, B b) {            \
    return __unpack(a) op b;                                              \
  }                                                                       \
  template <class A, class T, class = __operand<A>>                       \
  METAL_FUNC constexpr auto operator op(A a, __packed3<T> b) {            \
    return a op __unpack(b);                                              \
  }
#define __MSL_PACKED_UNARY(op)                            \
  template <class T>                                      \
  METAL_FUNC constexpr auto operator op(__packed3<T> a) { \
    return op __unpack(a);                                \
  }
#define __MSL_PACKED_ASSIGN(op, space)                                           \
  template <class T, class B>                                                    \
  METAL_FUNC space __packed3<T>& operator op## = (space __packed3<T> & a, B b) { \
    vec<T, 3> v = __unpack(a) op __unpack(b);                                    \
    a.x = v.x, a.y = v.y, a.z = v.z;                                             \
    return a;                                                                    \
  }
#define __MSL_PACKED_ARITHMETIC(op) \
  __MSL_PACKED_BINARY(op)           \
  __MSL_PACKED_ASSIGN(op, )         \
  __MSL_PACKED_ASSIGN(op, device)   \
  __MSL_PACKED_ASSIGN(op, threadgroup)
__MSL_EACH_OF_4(__MSL_PACKED_ARITHMETIC, +, -, *, /)
__MSL_EACH_OF_4(__MSL_PACKED_ARITHMETIC, %, &, |, ^)
__MSL_PACKED_ARITHMETIC(<<)
__MSL_PACKED_ARITHMETIC(>>)
__MSL_PACKED_BINARY(==)
__MSL_PACKED_BINARY(!=)
__MSL_EACH_OF_4(__MSL_PACKED_BINARY, <, <=, >, >=)
__MSL_PACKED_UNARY(-)
__MSL_PACKED_UNARY(~)
#undef __MSL_PACKED_ARITHMETIC
#undef __MSL_PACKED_ASSIGN
#undef __MSL_PACKED_UNARY
#undef __MSL_PACKED_BINARY

// The rewriter's form of the left side of `p[i] = v`. An object in device or threadgroup memory
// cannot have an assignment operator, so it is stored field by field.
template <class Pointer, class S, int N>
struct __stored {
  Pointer at;
  METAL_FUNC void operator=(const S& value) const {
    for (int i = 0; i < N; ++i) at[i] = (&value.x)[i];
  }
};
template <class T>
METAL_FUNC T& __target(T& object) {
  return object;
}
#define __MSL_TARGET(space)                                                             \
  template <class T>                                                                    \
  METAL_FUNC __stored<space T*, __packed3<T>, 3> __target(space __packed3<T>& object) { \
    return {&object.x};                                                                 \
  }                                                                                     \
  template <int N>                                                                      \
  METAL_FUNC __stored<space bool*, __bools<N>, N> __target(space __bools<N>& object) {  \
    return {&object.x};                                                                 \
  }
__MSL_EACH_WRITABLE(__MSL_TARGET)
#undef __MSL_TARGET

// The rewriter's form of `p[i]` in `p[i][j]`: C++ has no subscript operator for these spaces.
template <class T>
METAL_FUNC constexpr T&& __elements(T&& object) {
  return static_cast<T&&>(object);
}
#define __MSL_ELEMENTS(space)                                      \
  template <class T>                                               \
  METAL_FUNC space T(&__elements(space __packed3<T>& object))[3] { \
    return reinterpret_cast<space T(&)[3]>(object.x);              \
  }                                                                \
  template <int N>                                                 \
  METAL_FUNC space bool (&__elements(space __bools<N> & object))   \
      [N] { return reinterpret_cast<space bool (&)[N]>(object.x); }
__MSL_ELEMENTS()
__MSL_ELEMENTS(const)
__MSL_EACH_CONST_SPACE(__MSL_ELEMENTS)
#undef __MSL_ELEMENTS

template <class T, int N>
struct __packed_vector {
  typedef T type __attribute__((ext_vector_type(N), aligned(alignof(T))));
};
template <class T>
struct __packed_vector<T, 3> {
  typedef __packed3<T> type;
};
template <class T, int N>
using packed_vec = typename __packed_vector<T, N>::type;

}  // namespace metal

#define __MSL_PACKED(T, N)                       \
  typedef metal::packed_vec<T, N> packed_##T##N; \
  namespace metal {                              \
  using ::packed_##T##N;                         \
  }
#define __MSL_PACKED_VECTORS(T) __MSL_EACH_LENGTH(__MSL_PACKED, T)
__MSL_EACH_ELEMENT(__MSL_PACKED_VECTORS)
#undef __MSL_PACKED_VECTORS
#undef __MSL_PACKED
