// metal_simdgroup_matrix: 8x8 matrices distributed over a SIMD group. Lane l holds two neighbouring
// columns of one row:
//   q = l / 4, row = (q & 4) + l / 2 % 4, column = (q & 2) * 2 + l % 2 * 2
// `__msl_pair_index()` is row * 4 + column / 2.
#pragma once
#include <__msl_product.h>

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

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c) {
  static_assert(__is_same(D, C), "the accumulator and the result must have the same type");
  static_assert(__is_same(D, float) || (__is_same(D, A) && __is_same(D, B)) ||
                    (__is_same(D, half) && __is_same(A, float)),
                "a half or bfloat accumulator needs A and B of its own type; a half accumulator "
                "also accepts a float A");
  d.__elements = __product<D, A, B, C>(a.__elements, b.__elements, c.__elements);
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

// A lane reads its two neighbouring elements at once, with the alignment of one element.
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
    __msl_matrix_access();                                                                         \
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
    __msl_matrix_access();                                                                         \
    target += origin.y * elements_per_row + origin.x;                                              \
    if (transpose) {                                                                               \
      target[column * elements_per_row + row] = m.__elements.x;                                    \
      target[(column + 1) * elements_per_row + row] = m.__elements.y;                              \
    } else {                                                                                       \
      *(space typename __neighbours<T>::type*)(target + row * elements_per_row + column) =         \
          m.__elements;                                                                            \
    }                                                                                              \
  }
__MSL_EACH_WRITABLE(__MSL_LOAD_STORE)
#undef __MSL_LOAD_STORE

}  // namespace metal
