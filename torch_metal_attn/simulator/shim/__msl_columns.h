// metal_matrix: matrices of vectors, column by column.
#pragma once
#include <__msl_math.h>
#include <__msl_objects.h>

namespace metal {

template <class T, int Columns, int Rows>
struct matrix {
  static_assert(__is_same(T, half) || __is_same(T, bfloat) || __is_same(T, float),
                "a matrix holds half, bfloat or float");
  static_assert(Columns >= 2 && Columns <= 4 && Rows >= 2 && Rows <= 4,
                "a matrix has 2 to 4 columns and rows");
  typedef vec<T, Rows> column;
  column columns[Columns];

  matrix() = default;
  // `value` on the diagonal, 0 elsewhere.
  explicit constexpr matrix(T value) : columns() {
    for (int i = 0; i < Columns && i < Rows; ++i) columns[i][i] = value;
  }
  template <class... V, bool fits = sizeof...(V) == Columns && (__is_same(V, column) && ...),
            class = enable_if_t<fits>>
  constexpr matrix(V... v) : columns{v...} {}
  template <class... S, class = enable_if_t<sizeof...(S) == Columns * Rows>,
            class = enable_if_t<(!__is_vector<S> && ...)>>
  constexpr matrix(S... s) : columns() {
    const T all[] = {(T)s...};
    for (int i = 0; i < Columns; ++i)
      for (int j = 0; j < Rows; ++j) columns[i][j] = all[i * Rows + j];
  }
  template <class U, class = enable_if_t<!__is_same(U, T)>>
  explicit constexpr matrix(const matrix<U, Columns, Rows>& other) : columns() {
    for (int i = 0; i < Columns; ++i) columns[i] = __mk<column>(other.columns[i]);
  }
#define __MSL_COPY(space)                                         \
  matrix(const space matrix& other) : matrix(__copied(&other)) {} \
  template <class U, class = enable_if_t<!__is_same(U, T)>>       \
  explicit matrix(const space matrix<U, Columns, Rows>& other) : matrix(__copied(&other)) {}
  __MSL_EACH_SPACE(__MSL_COPY)
#undef __MSL_COPY
  matrix(const matrix&) = default;
  matrix& operator=(const matrix&) = default;

  constexpr column& operator[](int i) { return columns[i]; }
  constexpr const column& operator[](int i) const { return columns[i]; }

  friend constexpr matrix operator-(matrix a) {
    for (int i = 0; i < Columns; ++i) a.columns[i] = -a.columns[i];
    return a;
  }
  friend constexpr matrix operator+(matrix a, matrix b) {
    for (int i = 0; i < Columns; ++i) a.columns[i] += b.columns[i];
    return a;
  }
  friend constexpr matrix operator-(matrix a, matrix b) {
    for (int i = 0; i < Columns; ++i) a.columns[i] -= b.columns[i];
    return a;
  }
  friend constexpr matrix operator*(matrix a, T s) {
    for (int i = 0; i < Columns; ++i) a.columns[i] *= s;
    return a;
  }
  friend constexpr matrix operator*(T s, matrix a) { return a * s; }
  friend constexpr column operator*(matrix a, vec<T, Columns> v) {
    column sum = a.columns[0] * v[0];
    for (int i = 1; i < Columns; ++i) sum += a.columns[i] * v[i];
    return sum;
  }
  friend constexpr vec<T, Columns> operator*(column v, matrix a) {
    vec<T, Columns> products{};
    for (int i = 0; i < Columns; ++i) products[i] = __dot(v, a.columns[i]);
    return products;
  }
  friend constexpr bool operator==(matrix a, matrix b) {
    bool same = true;
    for (int i = 0; i < Columns; ++i)
      for (int j = 0; j < Rows; ++j) same = same && a.columns[i][j] == b.columns[i][j];
    return same;
  }
  friend constexpr bool operator!=(matrix a, matrix b) { return !(a == b); }
};
#define __MSL_ELEMENTS(space)      \
  template <class T, int C, int R> \
  METAL_FUNC space vec<T, R>(&__elements(space matrix<T, C, R> & m)) [C] { return m.columns; }
__MSL_EACH_CONST_SPACE(__MSL_ELEMENTS)
#undef __MSL_ELEMENTS
template <class T, int Inner, int Rows, int Columns>
METAL_FUNC constexpr matrix<T, Columns, Rows> operator*(matrix<T, Inner, Rows> a,
                                                        matrix<T, Columns, Inner> b) {
  matrix<T, Columns, Rows> product;
  for (int i = 0; i < Columns; ++i) product.columns[i] = a * b.columns[i];
  return product;
}
template <class T, int Columns, int Rows>
METAL_FUNC constexpr matrix<T, Rows, Columns> transpose(matrix<T, Columns, Rows> a) {
  matrix<T, Rows, Columns> t;
  for (int i = 0; i < Columns; ++i)
    for (int j = 0; j < Rows; ++j) t.columns[j][i] = a.columns[i][j];
  return t;
}
template <class T>
METAL_FUNC constexpr T determinant(matrix<T, 2, 2> a) {
  return a.columns[0].x * a.columns[1].y - a.columns[1].x * a.columns[0].y;
}
template <class T>
METAL_FUNC constexpr T determinant(matrix<T, 3, 3> a) {
  return __dot(a.columns[0], metal::cross(a.columns[1], a.columns[2]));
}
template <class T>
METAL_FUNC constexpr T determinant(matrix<T, 4, 4> a) {
  vec<T, 4> p = a.columns[0], q = a.columns[1], r = a.columns[2], s = a.columns[3];
  T det = (p.x * q.y - p.y * q.x) * (r.z * s.w - r.w * s.z);
  det -= (p.x * q.z - p.z * q.x) * (r.y * s.w - r.w * s.y);
  det += (p.x * q.w - p.w * q.x) * (r.y * s.z - r.z * s.y);
  det += (p.y * q.z - p.z * q.y) * (r.x * s.w - r.w * s.x);
  det -= (p.y * q.w - p.w * q.y) * (r.x * s.z - r.z * s.x);
  det += (p.z * q.w - p.w * q.z) * (r.x * s.y - r.y * s.x);
  return det;
}

}  // namespace metal

#define __MSL_SHAPE(T, C, R)                 \
  typedef metal::matrix<T, C, R> T##C##x##R; \
  namespace metal {                          \
  using ::T##C##x##R;                        \
  }
__MSL_EACH_LENGTH(__MSL_SHAPE, half, 2)
__MSL_EACH_LENGTH(__MSL_SHAPE, half, 3)
__MSL_EACH_LENGTH(__MSL_SHAPE, half, 4)
__MSL_EACH_LENGTH(__MSL_SHAPE, float, 2)
__MSL_EACH_LENGTH(__MSL_SHAPE, float, 3)
__MSL_EACH_LENGTH(__MSL_SHAPE, float, 4)
#undef __MSL_SHAPE
