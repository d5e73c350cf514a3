// MetalPerformancePrimitives: products of matrices in cooperative tensors.
#pragma once
#include <__msl_cooperative.h>
#include <__msl_tensor_product.h>

namespace mpp {
namespace tensor_ops {

// A descriptor as a template's argument: C++17 has none of a class.
enum __descriptor_code : ulong {};

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right;
  bool relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m, int n, int k = (int)metal::dynamic_extent,
                                bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
  constexpr operator __descriptor_code() const {
    ulong flags = transpose_left | transpose_right << 1 | relaxed_precision << 2 |
                  (matmul_mode == mode::multiply_accumulate) << 3;
    return (__descriptor_code)((ulong)(ushort)m << 48 | (ulong)(ushort)n << 32 |
                               (ulong)(k & 0xFFFFFFF) << 4 | flags);
  }
};
constexpr matmul2d_descriptor __decoded(__descriptor_code code) {
  int k = code >> 4 & 0xFFFFFFF;
  return {(int)(code >> 48),
          (int)(code >> 32 & 0xFFFF),
          k == 0xFFFFFFF ? -1 : k,
          (code & 1) != 0,
          (code >> 1 & 1) != 0,
          (code >> 2 & 1) != 0,
          code >> 3 & 1 ? matmul2d_descriptor::mode::multiply_accumulate
                        : matmul2d_descriptor::mode::multiply};
}

template <class Scope>
constexpr int __simdgroups = 0;
template <int Count>
constexpr int __simdgroups<metal::execution_simdgroups<Count>> = Count;

// What the cooperative tensors of a product have in common: all but its mode.
template <ulong Shape, int SimdGroups, class LeftElement, class RightElement>
struct __matmul {};

template <class Element>
constexpr bool __is_cooperative = false;
template <class Element, class Extents, class Layout>
constexpr bool __is_cooperative<metal::cooperative_tensor<Element, Extents, Layout>> = true;

template <class LeftElement, class RightElement, class ResultElement>
constexpr bool __multiplies =
    (__is_same(LeftElement, RightElement) &&
     (__is_same(ResultElement, float) || __is_same(ResultElement, LeftElement)) &&
     (__is_same(LeftElement, float) || __is_same(LeftElement, half) ||
      __is_same(LeftElement, bfloat))) ||
    (__is_same(LeftElement, float) &&
     (__is_same(RightElement, half) || __is_same(RightElement, bfloat)) &&
     __is_same(ResultElement, float));

template <__descriptor_code Code, class Scope, class... Arguments>
class matmul2d {
  static constexpr matmul2d_descriptor about = __decoded(Code);
  static constexpr int simdgroups = __simdgroups<Scope>;
  template <class LeftElement, class RightElement>
  using Matmul = __matmul<(Code & ~8ul), simdgroups, LeftElement, RightElement>;
  template <class Operation, class Element, uint Operand, bool IsTransposed, int Rows, int Columns>
  using Spread = metal::cooperative_tensor<
      Element, metal::extents<int, Columns, Rows>,
      metal::__spread<Operation, Operand, IsTransposed, Rows, Columns, simdgroups>>;

 public:
  static constexpr matmul2d_descriptor descriptor = about;
  typedef Scope scope;

  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  using cooperative_tensor_left_input_t =
      Spread<Matmul<LeftElement, RightElement>, LeftElement, MSL_LEFT, about.transpose_left,
             about.transpose_left ? about.k : about.m, about.transpose_left ? about.m : about.k>;
  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  using cooperative_tensor_right_input_t =
      Spread<Matmul<LeftElement, RightElement>, RightElement, MSL_RIGHT, about.transpose_right,
             about.transpose_right ? about.n : about.k, about.transpose_right ? about.k : about.n>;
  template <class Left, class Right, class ResultElement, class Coordinate = int>
  using cooperative_tensor_destination_t =
      Spread<Matmul<typename Left::element_type, typename Right::element_type>, ResultElement,
             MSL_DESTINATION, false, about.m, about.n>;

  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  METAL_FUNC cooperative_tensor_left_input_t<LeftElement, RightElement, ResultElement>
  get_left_input_cooperative_tensor() const {
    check_inputs<LeftElement, RightElement, ResultElement>();
    cooperative_tensor_left_input_t<LeftElement, RightElement, ResultElement> unset;
    return unset;
  }
  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  METAL_FUNC cooperative_tensor_right_input_t<LeftElement, RightElement, ResultElement>
  get_right_input_cooperative_tensor() const {
    check_inputs<LeftElement, RightElement, ResultElement>();
    cooperative_tensor_right_input_t<LeftElement, RightElement, ResultElement> unset;
    return unset;
  }
  template <class Left, class Right, class ResultElement, class Coordinate = int>
  METAL_FUNC cooperative_tensor_destination_t<Left, Right, ResultElement>
  get_destination_cooperative_tensor() const {
    static_assert(__is_cooperative<Left> && __is_cooperative<Right>,
                  "get_destination_cooperative_tensor takes the types of both operands "
                  "(decltype), not of their elements");
    cooperative_tensor_destination_t<Left, Right, ResultElement> unset;
    return unset;
  }

  template <class Left, class Right, class Destination>
  METAL_FUNC void run(Left& left, Right& right, Destination& destination) const {
    typedef typename Left::element_type LeftElement;
    typedef typename Right::element_type RightElement;
    typedef typename Destination::element_type ResultElement;
    check_inputs<LeftElement, RightElement, ResultElement>();
    static_assert(
        __is_same(Left, cooperative_tensor_left_input_t<LeftElement, RightElement, ResultElement>),
        "the left operand belongs to another product");
    static_assert(
        __is_same(Right,
                  cooperative_tensor_right_input_t<LeftElement, RightElement, ResultElement>),
        "the right operand belongs to another product");
    static_assert(
        __is_same(Destination, cooperative_tensor_destination_t<Left, Right, ResultElement>),
        "the destination belongs to another product");
    constexpr uint slots[3] = {Left::layout::slots, Right::layout::slots,
                               Destination::layout::slots};
    constexpr bool accumulates =
        about.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    static constexpr metal::__tensor_product product = {
        (uint)about.m,
        (uint)about.n,
        (uint)about.k,
        {MSL_LEFT, about.transpose_left, Left::layout::rows, Left::layout::columns, 0},
        {MSL_RIGHT, about.transpose_right, Right::layout::rows, Right::layout::columns, slots[0]},
        {MSL_DESTINATION, false, about.m, about.n, slots[0] + slots[1]},
        accumulates,
        about.relaxed_precision && __is_same(LeftElement, float),
        about.relaxed_precision && __is_same(RightElement, float)};
    __attribute__((uninitialized)) float elements[slots[0] + slots[1] + slots[2]];
    leave(elements, left);
    leave(elements + slots[0], right);
    if constexpr (accumulates) leave(elements + slots[0] + slots[1], destination);
    __msl_tensor_product(elements, &product);
    for (uint i = 0; i < slots[2]; ++i)
      destination.__elements[i] = (ResultElement)__msl_take(elements + slots[0] + slots[1] + i);
  }

 private:
  template <class LeftElement, class RightElement, class ResultElement>
  static constexpr void check_inputs() {
    static_assert(simdgroups == 1, "cooperative inputs need execution_simdgroup");
    static_assert((about.m == 16 || about.m == 32) && (about.n == 16 || about.n == 32) &&
                      (about.k == 16 || about.k == 32) &&
                      (about.m == 32 || about.n == 32 || about.k == 32),
                  "with cooperative inputs M, N and K are 16 or 32, and one of them is 32");
    static_assert(__multiplies<LeftElement, RightElement, ResultElement>,
                  "matmul2d has no product of these element types");
  }
  template <class Tensor>
  METAL_FUNC static void leave(float* to, const Tensor& tensor) {
    for (uint i = 0; i < Tensor::layout::slots; ++i) __msl_leave(to + i, (float)tensor[i]);
  }
};

}  // namespace tensor_ops
}  // namespace mpp
