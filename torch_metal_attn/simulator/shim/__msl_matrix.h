// metal_simdgroup_matrix: 8x8 matrices spread over a SIMD group. Lane l holds two neighbouring
// columns of one row:
//   q = l / 4, row = (q & 4) + l / 2 % 4, column = (q & 2) * 2 + l % 2 * 2
// `__msl_pair_index()` is row * 4 + column / 2.
#pragma once
#include <__msl_simd.h>

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "a simdgroup_matrix is 8 by 8");
  static_assert(__is_float_element<T> && !__is_vector<T>,
                "a simdgroup_matrix holds half, bfloat or float");
  typedef vec<T, 2> storage_type;
  typedef T element_type;
  storage_type __elements;

#ifdef MSL_UNDEFINED
  simdgroup_matrix() : __elements(__unset_value<T>("a simdgroup_matrix")) {}
#else
  simdgroup_matrix() {}
#endif
  // `value` on the diagonal, 0 elsewhere.
  explicit simdgroup_matrix(T value) {
    uint pair = __msl_pair_index(), row = pair / 4, column = pair % 4 * 2;
    __elements.x = row == column ? value : (T)0;
    __elements.y = row == column + 1 ? value : (T)0;
  }
  METAL_FUNC storage_type& thread_elements() { return __elements; }
  METAL_FUNC const storage_type& thread_elements() const { return __elements; }
};

typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int Rows = 8, int Columns = 8>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.__elements = (vec<T, 2>)value;
  return m;
}
template <class T, int Rows = 8, int Columns = 8>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Rows, Columns>(value);
}

typedef float __msl_row __attribute__((ext_vector_type(8)));

// Row `i` of a deposited matrix of T, in float32.
template <class T>
METAL_FUNC __msl_row __matrix_row(const __msl_pair* pairs, int i) {
  if constexpr (sizeof(T) == 4) {
    __msl_row row;
    __builtin_memcpy(&row, pairs + 4 * i, sizeof(row));
    return row;
  } else {
    // 16-bit elements lie in the low half of each pair.
    vec<T, 16> all;
    __builtin_memcpy(&all, pairs + 4 * i, sizeof(all));
    auto row = __builtin_shufflevector(all, all, 0, 1, 4, 5, 8, 9, 12, 13);
    return __builtin_convertvector(row, __msl_row);
  }
}
// D = A B + C in float32, k ascending, each step one fused multiply-add, rounded to D's type at the
// end.
template <class D, class A, class B, class C>
MSL_INTERNAL void __combine_matrix(void* deposits, unsigned) {
  __msl_matrices& m = *(__msl_matrices*)deposits;
  __msl_row b[8];
  for (int k = 0; k < 8; ++k) b[k] = __matrix_row<B>(m.b, k);
  for (int i = 0; i < 8; ++i) {
    __msl_row a = __matrix_row<A>(m.a, i);
    __msl_row d = __matrix_row<C>(m.c, i);
    for (int k = 0; k < 8; ++k) d = __builtin_elementwise_fma((__msl_row)a[k], b[k], d);
    if constexpr (sizeof(D) == 4) {
      __builtin_memcpy(m.d + 4 * i, &d, sizeof(d));
    } else {
      typedef vec<D, 8> Narrow;
      Narrow narrow = __builtin_convertvector(d, Narrow);
      for (int j = 0; j < 4; ++j)
        __builtin_memcpy(m.d + 4 * i + j, (const char*)&narrow + 4 * j, 4);
    }
  }
}
template <class T>
METAL_FUNC __msl_pair __to_pair(vec<T, 2> elements) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(__msl_pair, elements);
  } else {
    return __builtin_bit_cast(__msl_pair, (ulong) __builtin_bit_cast(uint, elements));
  }
}
template <class T>
METAL_FUNC vec<T, 2> __from_pair(__msl_pair pair) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(__typeof__(vec<T, 2>), pair);
  } else {
    return __builtin_bit_cast(__typeof__(vec<T, 2>), (uint) __builtin_bit_cast(ulong, pair));
  }
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c) {
  static_assert(__is_same(D, C), "the accumulator and the result have one type");
  static_assert(__is_same(D, float) || (__is_same(D, A) && __is_same(D, B)),
                "only float32 accumulates operands of another type");
  static_assert(__is_same(A, B) || __is_same(A, float), "operands of two types: A must be float32");
  d.__elements =
      __from_pair<D>(__msl_matrix(&__combine_matrix<D, A, B, C>, __to_pair<A>(a.__elements),
                                  __to_pair<B>(b.__elements), __to_pair<C>(c.__elements)));
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}
template <class T>
METAL_FUNC simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                               const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

// A lane reads its two neighbouring elements as one, which need no more alignment than an element.
template <class T>
struct __neighbours {
  typedef T type __attribute__((ext_vector_type(2), aligned(alignof(T))));
};
#define __MSL_LOAD_STORE(space)                                                                    \
  template <class T>                                                                               \
  METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const space T* source,              \
                                 ulong elements_per_row = 8, ulong2 origin = 0,                    \
                                 bool transpose = false) {                                         \
    uint pair = __msl_pair_index(), row = pair / 4, column = pair % 4 * 2;                         \
    source += origin.y * elements_per_row + origin.x;                                              \
    if (transpose) {                                                                               \
      m.__elements.x = source[column * elements_per_row + row];                                    \
      m.__elements.y = source[(column + 1) * elements_per_row + row];                              \
    } else {                                                                                       \
      m.__elements = *(const space                                                                 \
                       typename __neighbours<T>::type*)(source + row * elements_per_row + column); \
    }                                                                                              \
  }                                                                                                \
  template <class T>                                                                               \
  METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, space T* target,             \
                                  ulong elements_per_row = 8, ulong2 origin = 0,                   \
                                  bool transpose = false) {                                        \
    uint pair = __msl_pair_index(), row = pair / 4, column = pair % 4 * 2;                         \
    target += origin.y * elements_per_row + origin.x;                                              \
    if (transpose) {                                                                               \
      target[column * elements_per_row + row] = m.__elements.x;                                    \
      target[(column + 1) * elements_per_row + row] = m.__elements.y;                              \
    } else {                                                                                       \
      *(space typename __neighbours<T>::type*)(target + row * elements_per_row + column) =         \
          m.__elements;                                                                            \
    }                                                                                              \
  }
__MSL_LOAD_STORE(device)
__MSL_LOAD_STORE(threadgroup)
#undef __MSL_LOAD_STORE

}  // namespace metal
