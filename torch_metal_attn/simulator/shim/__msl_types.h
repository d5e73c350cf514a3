// Scalars, vectors and their construction.
#pragma once
#include <abi.h>

typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST __attribute__((const))
// Code of the shim that a checked build must neither instrument nor count.
#define MSL_INTERNAL                                                                  \
  __attribute__((noinline, disable_sanitizer_instrumentation, no_instrument_function, \
                 visibility("hidden")))

// clang converts float to bfloat16 by a call into its run-time library, which is not linked.
extern "C" __attribute__((used, weak, visibility("hidden"), no_instrument_function,
                          disable_sanitizer_instrumentation)) inline bfloat
__truncsfbf2(float x) {
  uint bits = __builtin_bit_cast(uint, x);
  uint rounded = x != x ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(bfloat, (ushort)rounded);
}

// Converts double to half likewise. Metal has no double, but clang may fold constants in double.
extern "C" __attribute__((used, weak, visibility("hidden"), no_instrument_function,
                          disable_sanitizer_instrumentation)) inline half
__truncdfhf2(double x) {
  return (half)(float)x;
}

namespace metal {

typedef const char* __text;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <int N>
struct __bools;

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

// The unsigned integer with as many bytes as T.
template <int bytes>
struct __word {
  typedef unsigned __int128 type;
};
template <class T>
using __bits = typename __word<sizeof(T)>::type;
#define __MSL_WORD(T)        \
  template <>                \
  struct __word<sizeof(T)> { \
    typedef T type;          \
  };
__MSL_WORD(uchar)
__MSL_WORD(ushort)
__MSL_WORD(uint)
__MSL_WORD(ulong)
#undef __MSL_WORD

}  // namespace metal

typedef metal::__bools<2> bool2;
typedef metal::__bools<3> bool3;
typedef metal::__bools<4> bool4;

// DO(space) for the address spaces that threads share: writable ones; all; all, also with const.
#define __MSL_EACH_WRITABLE(DO) DO(device) DO(threadgroup)
#define __MSL_EACH_SPACE(DO) __MSL_EACH_WRITABLE(DO) DO(constant)
#define __MSL_EACH_CONST_SPACE(DO) __MSL_EACH_SPACE(DO) DO(const device) DO(const threadgroup)
// Each element type of a vector except bool.
#define __MSL_EACH_ELEMENT(DO) \
  DO(char)                     \
  DO(uchar)                    \
  DO(short)                    \
  DO(ushort)                   \
  DO(int)                      \
  DO(uint)                     \
  DO(long)                     \
  DO(ulong)                    \
  DO(half)                     \
  DO(bfloat)                   \
  DO(float)
#define __MSL_EACH_LENGTH(DO, ...) DO(__VA_ARGS__, 2) DO(__VA_ARGS__, 3) DO(__VA_ARGS__, 4)
#define __MSL_EACH_OF_4(DO, a, b, c, d) DO(a) DO(b) DO(c) DO(d)

#define __MSL_VECTOR(T, N)       \
  typedef metal::vec<T, N> T##N; \
  namespace metal {              \
  using ::T##N;                  \
  }
#define __MSL_VECTORS(T) __MSL_EACH_LENGTH(__MSL_VECTOR, T)
__MSL_EACH_ELEMENT(__MSL_VECTORS)
#undef __MSL_VECTORS
#undef __MSL_VECTOR

namespace metal {
using ::bfloat, ::bool2, ::bool3, ::bool4, ::int16_t, ::int32_t, ::int64_t, ::int8_t, ::ptrdiff_t,
    ::size_t, ::uchar, ::uint, ::uint16_t, ::uint32_t, ::uint64_t, ::uint8_t, ::ulong, ::ushort;

// Element type and length of a vector. A scalar has length 1.
template <class T>
struct __vector_of {
  typedef T element;
  enum : int { length = 1 };
  enum : bool { is_vector = false };
};
#define __MSL_TRAIT(T, N)             \
  template <>                         \
  struct __vector_of<vec<T, N>> {     \
    typedef T element;                \
    enum : int { length = N };        \
    enum : bool { is_vector = true }; \
  };
#define __MSL_TRAITS(T) __MSL_EACH_LENGTH(__MSL_TRAIT, T)
__MSL_EACH_ELEMENT(__MSL_TRAITS)
__MSL_TRAITS(bool)
#undef __MSL_TRAITS
#undef __MSL_TRAIT

template <class T>
using __element = typename __vector_of<T>::element;
template <class T>
constexpr bool __is_vector = __vector_of<T>::is_vector;
template <class T>
constexpr int __length = __vector_of<T>::length;
// T with the length of `Like`: a vector, or a scalar if `Like` is a scalar.
template <class T, class Like, bool vector = __is_vector<Like>>
struct __with_length {
  typedef vec<T, __length<Like>> type;
};
template <class T, class Like>
struct __with_length<T, Like, false> {
  typedef T type;
};
template <class T, class Like>
using __like = typename __with_length<T, Like>::type;
}  // namespace metal

#include <__msl_bool.h>

#ifdef MSL_UNDEFINED
// Unwritten bits, whose uses `llvm/uninitialised.py` finds.
extern "C" {
__attribute__((const)) uchar __msl_unset_8(const char* variable);
__attribute__((const)) ushort __msl_unset_16(const char* variable);
__attribute__((const)) uint __msl_unset_32(const char* variable);
__attribute__((const)) ulong __msl_unset_64(const char* variable);
__attribute__((const)) half __msl_unset_half(const char* variable);
__attribute__((const)) bfloat __msl_unset_bfloat(const char* variable);
__attribute__((const)) float __msl_unset_float(const char* variable);
}
#endif

namespace metal {
#ifdef MSL_UNDEFINED
// True if byte i belongs to a field. For padding, the cast is no constant expression, so it fails.
template <class T>
struct __bytes {
  uchar values[sizeof(T)];
};
template <class T, int i, class = void>
constexpr bool __in_field = false;
template <class T, int i>
constexpr bool __in_field<T, i, enable_if_t<(__builtin_bit_cast(__bytes<T>, T{}).values[i] >= 0)>> =
    true;
template <class T>
METAL_FUNC T __unset_value(const char* variable) {
  if constexpr (__is_same(T, float))
    return __msl_unset_float(variable);
  else if constexpr (__is_same(T, half))
    return __msl_unset_half(variable);
  else if constexpr (__is_same(T, bfloat))
    return __msl_unset_bfloat(variable);
  else if constexpr (sizeof(T) == 1)
    return __builtin_bit_cast(T, __msl_unset_8(variable));
  else if constexpr (sizeof(T) == 2)
    return __builtin_bit_cast(T, __msl_unset_16(variable));
  else if constexpr (sizeof(T) == 4)
    return __builtin_bit_cast(T, __msl_unset_32(variable));
  else
    return __builtin_bit_cast(T, __msl_unset_64(variable));
}
template <class T, T... i>
struct __sequence {};
// Marks the fields of a struct as unwritten, but not its padding, which nothing would write. It
// uses the longest words that contain either only field bytes or only padding.
template <class T, int... i>
METAL_FUNC void __unset_fields(T& x, const char* variable, __sequence<int, i...>) {
  // The first byte is always in a field. If the compiler cannot tell (a union), all bytes count.
  constexpr bool known = __in_field<T, 0>, in_field[] = {!known || __in_field<T, i>...};
  constexpr auto word_bytes = [&] {
    int bytes = alignof(T) < 4 ? alignof(T) : 4;
    for (int at = 1; at < (int)sizeof(T); ++at)
      while (in_field[at] != in_field[at - 1] && at % bytes) bytes /= 2;
    return bytes;
  }();
  auto word = __unset_value<typename __word<word_bytes>::type>(variable);
  ((i % word_bytes == 0 && in_field[i] ? __builtin_memcpy((char*)&x + i, &word, word_bytes)
                                       : nullptr),
   ...);
}
template <class T>
METAL_FUNC constexpr void __unset(T& x, const char* variable);
template <class T, int... i>
METAL_FUNC void __unset_each(T& x, const char* variable, __sequence<int, i...>) {
  (__unset(x[i], variable), ...);
}
#endif
// The rewriter calls this for a variable that is declared without a value. A long variable is
// filled by memset, because stores to each part would take long to compile.
template <class T>
METAL_FUNC constexpr void __unset(T& x, const char* variable) {
#ifdef MSL_UNDEFINED
  if (__builtin_is_constant_evaluated()) return;
  if constexpr (sizeof(T) > 32) {
    if constexpr (__is_trivially_constructible(T))
      __builtin_memset((void*)&x, __msl_unset_8(variable), sizeof(T));
  } else if constexpr (__is_array(T)) {
    __unset_each(x, variable, __make_integer_seq<__sequence, int, sizeof(x) / sizeof(x[0])>());
  } else if constexpr (__is_same(T, bool)) {
    x = __msl_unset_8(variable) & 1;
  } else if constexpr (__is_vector<T>) {
    if constexpr (!__is_same(__element<T>, bool)) x = (T)__unset_value<__element<T>>(variable);
  } else if constexpr (__is_arithmetic(T) || __is_same(T, bfloat) || __is_same(T, half)) {
    x = __unset_value<T>(variable);
  } else if constexpr (__is_class(T) && __is_trivially_constructible(T) && alignof(T) > 1) {
    __unset_fields(x, variable, __make_integer_seq<__sequence, int, sizeof(T)>());
  } else if constexpr ((__is_class(T) || __is_union(T)) && __is_trivially_constructible(T)) {
    // Such an object may be written in parts and read whole. So it stays in memory, with marks.
    for (ulong i = 0; i < sizeof(T); ++i) ((volatile uchar*)&x)[i] = __msl_unset_8(variable);
  }
#else
  (void)x;
  (void)variable;
#endif
}

// Packed vectors of three are structs (__msl_packed.h), which are converted to vectors first.
template <class T>
struct __packed3;
template <class T>
constexpr bool __is_packed3 = false;
template <class T>
constexpr bool __is_packed3<__packed3<T>> = true;
template <class A>
METAL_FUNC constexpr A __unpack(A a) {
  return a;
}

// The rewriter's form of `float4(a, b.xyz)`. The arguments are scalars and vectors in any mix, each
// converted to the element type.
template <class V>
METAL_FUNC constexpr V __mk() {
  return V{};
}
template <class V, class A>
METAL_FUNC constexpr V __mk(A a);
template <class V, int at>
METAL_FUNC constexpr void __fill(V&) {
  static_assert(at == __length<V>, "too few components for the vector");
}
template <class V, int at, class A, class... Rest>
METAL_FUNC constexpr void __fill(V& v, A a, Rest... rest) {
  static_assert(at + __length<A> <= __length<V>, "too many components for the vector");
  if constexpr (__is_vector<A>) {
    for (int i = 0; i < __length<A>; ++i) v[at + i] = __mk<__element<V>>((__element<A>)a[i]);
  } else {
    v[at] = __mk<__element<V>>(a);
  }
  __fill<V, at + __length<A>>(v, rest...);
}
template <class A, class B>
constexpr bool __are_16_bit_floats =
    (__is_same(A, half) && __is_same(B, bfloat)) || (__is_same(A, bfloat) && __is_same(B, half));
template <class V, class A>
METAL_FUNC constexpr V __mk(A a) {
  if constexpr (__are_16_bit_floats<__element<V>, __element<A>>) {
    // clang converts neither type to the other.
    return __mk<V>(__mk<__like<float, A>>(a));
  } else if constexpr (!__is_vector<V>) {
    return (V)a;
  } else if constexpr (__is_same(V, A)) {
    return a;
  } else if constexpr (__is_vector<A>) {
    static_assert(__length<A> == __length<V>, "a vector converts only to one of the same length");
#ifdef MSL_UNDEFINED
    constexpr bool checked = __is_integral(__element<V>);  // one by one, as floats may not fit
#else
    constexpr bool checked = false;
#endif
    if constexpr (checked || __is_same(__element<V>, bool) || __is_same(__element<A>, bool)) {
      V v{};
      __fill<V, 0>(v, a);
      return v;
    } else {
      return __builtin_convertvector(a, V);
    }
  } else {
    return (V)(__element<V>)a;
  }
}
template <class V, class A, class B, class... Rest>
METAL_FUNC constexpr V __mk(A a, B b, Rest... rest) {
  if constexpr (!__is_vector<V>) {
    V value(a, b, rest...);
    return value;
  } else if constexpr (__is_packed3<A> || __is_packed3<B> || (__is_packed3<Rest> || ...)) {
    return __mk<V>(__unpack(a), __unpack(b), __unpack(rest)...);
  } else if constexpr (!__is_vector<A> && !__is_vector<B> && (!__is_vector<Rest> && ...)) {
    constexpr bool fits = sizeof...(Rest) + 2 == __length<V>;
    static_assert(fits, "wrong number of components for the vector");
    if constexpr (!fits)
      return V{};
    else if constexpr (__are_16_bit_floats<__element<V>, A> ||
                       __are_16_bit_floats<__element<V>, B> ||
                       (__are_16_bit_floats<__element<V>, Rest> || ...))
      return V{__mk<__element<V>>(a), __mk<__element<V>>(b), __mk<__element<V>>(rest)...};
    else
      return V{(__element<V>)a, (__element<V>)b, (__element<V>)rest...};
  } else {
    V v{};
    __fill<V, 0>(v, a, b, rest...);
    return v;
  }
}

// The rewriter's form of `T(...)`, where T may be any type.
template <class T, class... A>
METAL_FUNC constexpr T __construct(A... a) {
  if constexpr (__is_vector<__remove_cv(T)>) {
    return __mk<__remove_cv(T)>(a...);
  } else if constexpr ((__are_16_bit_floats<__remove_cv(T), A> || ...)) {
    return (T)(float)(a, ...);
  } else if constexpr (sizeof...(A) == 1) {
    return (T)(a, ...);  // a cast, as T may be a pointer
  } else {
    T value(a...);
    return value;
  }
}
// The rewriter's form of `(T)x` is `__cast<T>() ->* x`. `->*` groups from the left, but casts group
// from the right, so `->*` also joins two casts.
template <class T>
struct __cast_to {
  template <class A>
  METAL_FUNC static constexpr T of(A a) {
    return __construct<T>(a);
  }
};
template <class Outer, class Inner>
struct __casts {
  template <class A>
  METAL_FUNC static constexpr auto of(A a) {
    return Outer::of(Inner::of(a));
  }
};
template <class T>
constexpr bool __is_cast = false;
template <class T>
constexpr bool __is_cast<__cast_to<T>> = true;
template <class A, class B>
constexpr bool __is_cast<__casts<A, B>> = true;
template <class T>
METAL_FUNC constexpr __cast_to<T> __cast() {
  return {};
}
template <class C, class A, class = enable_if_t<__is_cast<C>>>
METAL_FUNC constexpr auto operator->*(C, A a) {
  if constexpr (__is_cast<A>)
    return __casts<C, A>();
  else
    return C::of(a);
}

// The rewriter's form of an argument `{a, b}`. clang passes such a list as a struct, but not as a
// vector.
template <int count, class A, class B, class C, class D>
struct __list {
  A a;
  B b;
  C c;
  D d;
  template <class T, class = enable_if_t<!__is_scalar(T)>>
  constexpr operator T() const {
    static_assert(!__is_vector<T> || __length<T> == count, "wrong number of components");
    if constexpr (__is_vector<T> && count == 2)
      return __mk<T>(a, b);
    else if constexpr (__is_vector<T> && count == 3)
      return __mk<T>(a, b, c);
    else if constexpr (__is_vector<T>)
      return __mk<T>(a, b, c, d);
    else if constexpr (count == 2)
      return T{a, b};
    else if constexpr (count == 3)
      return T{a, b, c};
    else
      return T{a, b, c, d};
  }
};
template <class A, class B>
METAL_FUNC constexpr __list<2, A, B, int, int> __braces(A a, B b) {
  return {a, b, 0, 0};
}
template <class A, class B, class C>
METAL_FUNC constexpr __list<3, A, B, C, int> __braces(A a, B b, C c) {
  return {a, b, c, 0};
}
template <class A, class B, class C, class D>
METAL_FUNC constexpr __list<4, A, B, C, D> __braces(A a, B b, C c, D d) {
  return {a, b, c, d};
}
}  // namespace metal

template <class T, class U>
METAL_FUNC constexpr T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of the same size");
  return __builtin_bit_cast(T, u);
}
