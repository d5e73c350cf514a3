// A product of 8x8 matrices, which the engine computes from the elements that lanes hold.
#pragma once
#include <__msl_simd.h>

namespace metal {

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
// D = A B + C in float32 with k ascending. Each step is one fused multiply-add. The result is
// rounded to D's type at the end.
template <class D, class A, class B, class C>
MSL_INTERNAL void __combine_matrix(void* deposits, unsigned) {
  __msl_matrices& m = *(__msl_matrices*)deposits;
  __msl_row b[8];
  for (int k = 0; k < 8; ++k) b[k] = __matrix_row<B>(m.b, k);
  for (int i = 0; i < 8; ++i) {
    __msl_row a = __matrix_row<A>(m.a, i);
    __msl_row d = __matrix_row<C>(m.c, i);
    // A checked build would not unroll a loop.
    d = __builtin_elementwise_fma((__msl_row)a[0], b[0], d);
    d = __builtin_elementwise_fma((__msl_row)a[1], b[1], d);
    d = __builtin_elementwise_fma((__msl_row)a[2], b[2], d);
    d = __builtin_elementwise_fma((__msl_row)a[3], b[3], d);
    d = __builtin_elementwise_fma((__msl_row)a[4], b[4], d);
    d = __builtin_elementwise_fma((__msl_row)a[5], b[5], d);
    d = __builtin_elementwise_fma((__msl_row)a[6], b[6], d);
    d = __builtin_elementwise_fma((__msl_row)a[7], b[7], d);
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
METAL_FUNC vec<D, 2> __product(vec<A, 2> a, vec<B, 2> b, vec<C, 2> c) {
  return __from_pair<D>(__msl_matrix(&__combine_matrix<D, A, B, C>, __to_pair<A>(a),
                                     __to_pair<B>(b), __to_pair<C>(c)));
}

}  // namespace metal
