// metal_type_traits, metal_limits, metal_array and metal_utility.
#pragma once
#include <__msl_types.h>

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<device T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<threadgroup T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<constant T> {
  typedef const T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

// A trait and its alias. The alias names the trait and not the built-in, because clang 19 and older
// crash on some built-ins in a generic lambda.
#define __MSL_TYPE(name, ...) \
  template <class T>          \
  struct name {               \
    typedef __VA_ARGS__ type; \
  };                          \
  template <class T>          \
  using name##_t = typename name<T>::type;
#define __MSL_BUILT_IN(name) __MSL_TYPE(name, __##name(T))
__MSL_EACH_OF_4(__MSL_BUILT_IN, remove_const, remove_volatile, remove_pointer, remove_extent)
__MSL_EACH_OF_4(__MSL_BUILT_IN, decay, make_unsigned, make_signed, underlying_type)
// Address spaces are qualifiers, so they are removed as well.
__MSL_TYPE(remove_cv, __remove_cv(remove_addrspace_t<T>))
__MSL_TYPE(remove_reference, __remove_reference_t(T))
__MSL_TYPE(add_const, const T)
__MSL_TYPE(type_identity, T)
#undef __MSL_BUILT_IN
#undef __MSL_TYPE

template <bool b, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool b, class T, class F>
using conditional_t = typename conditional<b, T, F>::type;

template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};
template <class B>
struct _negation : bool_constant<!B::value> {};

#define __MSL_IS(name, ...)                       \
  template <class T>                              \
  constexpr constant bool name##_v = __VA_ARGS__; \
  template <class T>                              \
  struct name : bool_constant<name##_v<T>> {};
#define __MSL_BUILT_IN(name) __MSL_IS(name, __##name(T))
__MSL_EACH_OF_4(__MSL_BUILT_IN, is_integral, is_unsigned, is_signed, is_const)
__MSL_EACH_OF_4(__MSL_BUILT_IN, is_pointer, is_reference, is_array, is_enum)
__MSL_EACH_OF_4(__MSL_BUILT_IN, is_class, is_union, is_void, is_trivially_copyable)
__MSL_IS(is_floating_point, __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) ||
                                __is_same(__remove_cv(T), bfloat))
__MSL_IS(is_arithmetic,
         __is_arithmetic(T) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat))
__MSL_IS(is_scalar, is_arithmetic_v<T> || __is_enum(T) || __is_pointer(T))
__MSL_IS(is_vector, __is_vector<__remove_cv(T)>)
#undef __MSL_BUILT_IN
#undef __MSL_IS

#define __MSL_OF_TWO(name)                           \
  template <class A, class B>                        \
  constexpr constant bool name##_v = __##name(A, B); \
  template <class A, class B>                        \
  struct name : bool_constant<name##_v<A, B>> {};
__MSL_EACH_OF_4(__MSL_OF_TWO, is_same, is_convertible, is_base_of, is_assignable)
#undef __MSL_OF_TWO

template <class T, class... A>
constexpr constant bool is_constructible_v = __is_constructible(T, A...);

template <class T>
__remove_reference_t(T) declval();

template <class T>
METAL_FUNC constexpr __remove_reference_t(T)&& move(T&& t) {
  return static_cast<__remove_reference_t(T)&&>(t);
}
template <class T>
METAL_FUNC void swap(T& a, T& b) {
  T t = a;
  a = b;
  b = t;
}

// 0 for a scalar.
template <class T>
struct vec_elements : integral_constant<int, __is_vector<T> ? __length<T> : 0> {};

template <class T, size_t N>
struct array {
  T __elements[N ? N : 1];
  constexpr T& operator[](size_t i) { return __elements[i]; }
  constexpr const T& operator[](size_t i) const { return __elements[i]; }
  constexpr size_t size() const { return N; }
  constexpr bool empty() const { return N == 0; }
  constexpr T* data() { return __elements; }
  constexpr const T* data() const { return __elements; }
  T& front() { return __elements[0]; }
  T& back() { return __elements[N - 1]; }
  T* begin() { return __elements; }
  const T* begin() const { return __elements; }
  T* end() { return __elements + N; }
  const T* end() const { return __elements + N; }
  void fill(T v) {
    for (size_t i = 0; i < N; ++i) __elements[i] = v;
  }
};

// Apple's header keeps the limits in a struct of this name, which texts specialise for their types.
template <class T>
struct _numeric_limits_impl {
  static constexpr constant bool is_specialized = false;
};
template <class T>
struct numeric_limits : _numeric_limits_impl<remove_cv_t<T>> {};
template <bool Integer, bool Signed, int Digits>
struct __limits {
  static constexpr constant bool is_specialized = true;
  static constexpr constant bool is_integer = Integer;
  static constexpr constant bool is_exact = Integer;
  static constexpr constant bool is_signed = Signed;
  static constexpr constant bool has_infinity = !Integer;
  static constexpr constant bool has_quiet_NaN = !Integer;
  static constexpr constant int radix = 2;
  static constexpr constant int digits = Digits;
};
#define __MSL_INTEGER(T, MIN, MAX)                                                            \
  template <>                                                                                 \
  struct _numeric_limits_impl<T> : __limits<true, (MIN) != 0, sizeof(T) * 8 - ((MIN) != 0)> { \
    static constexpr T min() { return MIN; }                                                  \
    static constexpr T lowest() { return MIN; }                                               \
    static constexpr T max() { return MAX; }                                                  \
    static constexpr T epsilon() { return 0; }                                                \
    static constexpr T infinity() { return 0; }                                               \
    static constexpr T quiet_NaN() { return 0; }                                              \
  };
__MSL_INTEGER(bool, false, true)
__MSL_INTEGER(char, -128, 127)
__MSL_INTEGER(signed char, -128, 127)
__MSL_INTEGER(uchar, 0, 255)
__MSL_INTEGER(short, -32768, 32767)
__MSL_INTEGER(ushort, 0, 65535)
__MSL_INTEGER(int, (-2147483647 - 1), 2147483647)
__MSL_INTEGER(uint, 0, 4294967295u)
__MSL_INTEGER(long, (-9223372036854775807l - 1), 9223372036854775807l)
__MSL_INTEGER(ulong, 0, 18446744073709551615ul)
#undef __MSL_INTEGER
#define __MSL_FLOAT(T, BITS, DIGITS, MAX_EXPONENT, MIN, MAX, EPSILON, DENORM_MIN, INF, NAN_BITS) \
  template <>                                                                                    \
  struct _numeric_limits_impl<T> : __limits<false, true, DIGITS> {                               \
    static constexpr constant bool is_iec559 = true;                                             \
    static constexpr constant int max_exponent = MAX_EXPONENT;                                   \
    static constexpr constant int min_exponent = 3 - MAX_EXPONENT;                               \
    static constexpr T min() { return as_type<T>((BITS)MIN); }                                   \
    static constexpr T lowest() {                                                                \
      return as_type<T>((BITS)(MAX | (BITS)1 << (sizeof(T) * 8 - 1)));                           \
    }                                                                                            \
    static constexpr T max() { return as_type<T>((BITS)MAX); }                                   \
    static constexpr T epsilon() { return as_type<T>((BITS)EPSILON); }                           \
    static constexpr T denorm_min() { return as_type<T>((BITS)DENORM_MIN); }                     \
    static constexpr T infinity() { return as_type<T>((BITS)INF); }                              \
    static constexpr T quiet_NaN() { return as_type<T>((BITS)NAN_BITS); }                        \
    static constexpr T signaling_NaN() { return as_type<T>((BITS)NAN_BITS); }                    \
  };
__MSL_FLOAT(float, uint, 24, 128, 0x00800000, 0x7F7FFFFF, 0x34000000, 1, 0x7F800000, 0x7FC00000)
__MSL_FLOAT(half, ushort, 11, 16, 0x0400, 0x7BFF, 0x1400, 1, 0x7C00, 0x7E00)
__MSL_FLOAT(bfloat, ushort, 8, 128, 0x0080, 0x7F7F, 0x3C00, 1, 0x7F80, 0x7FC0)
#undef __MSL_FLOAT

}  // namespace metal
