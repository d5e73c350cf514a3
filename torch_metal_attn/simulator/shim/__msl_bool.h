// Vectors of bool with one byte for each element, as in Metal. clang's own pack elements into bits.
#pragma once

namespace metal {

template <int N>
struct alignas(N) __bool_fields {
  bool x, more[N - 1];
};
template <>
struct alignas(2) __bool_fields<2> {
  bool x, y;
};
template <>
struct alignas(4) __bool_fields<3> {
  bool x, y, z;
};
template <>
struct alignas(4) __bool_fields<4> {
  bool x, y, z, w;
};

// In clang, a comparison of vectors gives integers, with all bits set for true. So any vector of
// the same length converts. Whole stores to device and threadgroup memory go through `__target`.
template <int N>
struct __bools : __bool_fields<N> {
  typedef __bool_fields<N> Fields;
  __bools() = default;
  explicit __bools(bool b) : Fields{} {
    for (int i = 0; i < N; ++i) (*this)[i] = b;
  }
  template <class... B, class = enable_if_t<sizeof...(B) == N>>
  __bools(B... b) : Fields{(bool)b...} {}
  template <class V, class = enable_if_t<__is_vector<V> && __length<V> == N>>
  __bools(V v) : Fields{} {
    for (int i = 0; i < N; ++i) (*this)[i] = v[i] != 0;
  }
  __bools(const __bools&) = default;
  // These are templates, because a copy constructor would make the type invalid in unions.
#define __MSL_COPY(space)                                        \
  template <class V, class = enable_if_t<__is_same(V, __bools)>> \
  __bools(const space V& o) : Fields{} {                         \
    read(&o.x);                                                  \
  }
  __MSL_EACH_SPACE(__MSL_COPY)
#undef __MSL_COPY
  __bools& operator=(const __bools&) = default;

  METAL_FUNC bool& operator[](int i) { return (&this->x)[i]; }
  METAL_FUNC bool operator[](int i) const { return (&this->x)[i]; }
  __bools operator!() const { return *this ^ __bools(true); }
#define __MSL_LOGIC(op, scalar_op)                          \
  friend __bools operator op(__bools a, __bools b) {        \
    for (int i = 0; i < N; ++i) a[i] = a[i] scalar_op b[i]; \
    return a;                                               \
  }
  __MSL_LOGIC(&, &&)
  __MSL_LOGIC(|, ||)
  __MSL_LOGIC(^, !=)
#undef __MSL_LOGIC
  friend __bools operator&&(__bools a, __bools b) { return a & b; }
  friend __bools operator||(__bools a, __bools b) { return a | b; }
  friend __bools operator!=(__bools a, __bools b) { return a ^ b; }
  friend __bools operator==(__bools a, __bools b) { return !(a ^ b); }

 private:
  template <class P>
  METAL_FUNC void read(P from) {
    for (int i = 0; i < N; ++i) (*this)[i] = from[i];
  }
};
template <int N>
struct __vector_of<__bools<N>> {
  typedef bool element;
  enum : int { length = N };
  enum : bool { is_vector = true };
};
template <class Like>
struct __with_length<bool, Like, true> {
  typedef __bools<__length<Like>> type;
};

}  // namespace metal
