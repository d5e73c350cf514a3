// MetalPerformancePrimitives: matmul2d.
#pragma once
#include <__msl_cooperative.h>
#include <__msl_tensor_combine.h>

namespace metal {

// The scopes of a tensor operation: the threads that compute it together.
struct execution_thread {};
struct execution_simdgroup {};
template <int Count>
struct execution_simdgroups {
  static_assert(Count > 0, "execution_simdgroups needs at least one SIMD group");
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

// A descriptor as a template argument. C++17 has no template arguments of a class type.
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

template <class Element>
constexpr Element dynamic_length_v = (Element)metal::dynamic_extent;

// The number of SIMD groups of a scope; 0 for a single thread, -1 for a type that is not a scope.
template <class Scope>
constexpr int __simdgroups = -1;
template <>
constexpr int __simdgroups<metal::execution_thread> = 0;
template <>
constexpr int __simdgroups<metal::execution_simdgroup> = 1;
template <int Count>
constexpr int __simdgroups<metal::execution_simdgroups<Count>> = Count;

// Identifies the product of a cooperative tensor. The descriptor's mode is left out.
template <ulong Descriptor, class Scope, class LeftElement, class RightElement>
struct __matmul {};

template <class Tensor>
constexpr bool __is_cooperative = false;
template <class Element, class Extents, class Layout>
constexpr bool __is_cooperative<metal::cooperative_tensor<Element, Extents, Layout>> = true;
template <class Tensor>
constexpr bool __is_view = false;
template <class Element, class Extents>
constexpr bool __is_view<metal::tensor<Element, Extents, metal::tensor_inline>> = true;
template <class Tensor>
constexpr bool __is_operand = __is_cooperative<Tensor> || __is_view<Tensor>;

// The element type of an operand, without an address space.
template <class Tensor, bool = __is_operand<Tensor>>
struct __element_of {
  typedef void type;
};
template <class Tensor>
struct __element_of<Tensor, true> {
  typedef typename Tensor::value_type type;
};
template <class Tensor, bool = __is_view<Tensor>>
constexpr bool __is_writable = true;
template <class Tensor>
constexpr bool __is_writable<Tensor, true> = !__is_const(typename Tensor::element_type);

template <class Element>
constexpr bool __is_simulated =
    __is_same(Element, float) || __is_same(Element, half) || __is_same(Element, bfloat);

template <class Left, class Right, class Result>
constexpr bool __multiplies =
    (__is_same(Left, Right) && (__is_same(Result, float) || __is_same(Result, Left))) ||
    (((__is_same(Left, float) && __is_same(Right, half)) ||
      ((__is_same(Left, float) || __is_same(Left, half)) && __is_same(Right, bfloat))) &&
     __is_same(Result, float));

template <__descriptor_code Code, class Scope, class... Arguments>
class matmul2d {
  static constexpr matmul2d_descriptor about = __decoded(Code);
  static constexpr int simdgroups = __simdgroups<Scope>;
  static_assert(simdgroups >= 0,
                "matmul2d takes execution_thread, execution_simdgroup or execution_simdgroups<N>");
  static constexpr int threads = simdgroups ? 32 * simdgroups : 1;
  static constexpr bool is_dynamic = about.k == (int)metal::dynamic_extent;
  static constexpr bool accumulates =
      about.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;

  template <class LeftElement, class RightElement>
  using Matmul = __matmul<(Code & ~8ul), Scope, LeftElement, RightElement>;
  template <class Operation, class Element, uint Operand, bool IsTransposed, int Rows, int Columns>
  using AsStored = metal::cooperative_tensor<
      Element, metal::extents<int, Columns, Rows>,
      metal::__spread<Operation, Operand, IsTransposed, Rows, Columns, simdgroups>>;
  // The tensor of a logical matrix.
  template <class Operation, class Element, uint Operand, bool IsTransposed, int Rows, int Columns>
  using Spread = AsStored<Operation, Element, Operand, IsTransposed, IsTransposed ? Columns : Rows,
                          IsTransposed ? Rows : Columns>;
  template <class Operation, class Element, int Inner>
  using LeftOf = Spread<Operation, Element, MSL_LEFT, about.transpose_left, about.m, Inner>;
  template <class Operation, class Element, int Inner>
  using RightOf = Spread<Operation, Element, MSL_RIGHT, about.transpose_right, Inner, about.n>;
  template <class Left, class Right>
  using MatmulOf = Matmul<typename __element_of<Left>::type, typename __element_of<Right>::type>;

 public:
  static constexpr matmul2d_descriptor descriptor = about;
  typedef Scope scope;

  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  using cooperative_tensor_left_input_t =
      LeftOf<Matmul<LeftElement, RightElement>, LeftElement, about.k>;
  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>
  using cooperative_tensor_right_input_t =
      RightOf<Matmul<LeftElement, RightElement>, RightElement, about.k>;
  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_destination_t =
      Spread<MatmulOf<Left, Right>, Element, MSL_DESTINATION, false, about.m, about.n>;
  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_row_reduction_destination_t =
      Spread<MatmulOf<Left, Right>, Element, MSL_ROWS, false, about.m, 1>;
  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_column_reduction_destination_t =
      Spread<MatmulOf<Left, Right>, Element, MSL_COLUMNS, false, 1, about.n>;

#define __MSL_DESTINATION(kind)                                             \
  template <class Left, class Right, class Element, class Coordinate = int> \
  METAL_FUNC auto get_##kind##_cooperative_tensor() const {                 \
    check_destination<Left, Right, Element>();                              \
    cooperative_tensor_##kind##_t<Left, Right, Element> unset;              \
    return unset;                                                           \
  }
  __MSL_DESTINATION(destination)
  __MSL_DESTINATION(row_reduction_destination)
  __MSL_DESTINATION(column_reduction_destination)
#undef __MSL_DESTINATION

  // Functions that return an input, tell whether another product's destination can be copied to it
  // slot by slot, and return an input copied from such a destination.
#define __MSL_INPUT(side, OwnElement)                                                              \
  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int>    \
  METAL_FUNC auto get_##side##_input_cooperative_tensor() const {                                  \
    check_input<LeftElement, RightElement, ResultElement>();                                       \
    cooperative_tensor_##side##_input_t<LeftElement, RightElement, ResultElement> unset;           \
    return unset;                                                                                  \
  }                                                                                                \
  template <class LeftElement, class RightElement, class ResultElement, class Element,             \
            class Extents, class Layout>                                                           \
  METAL_FUNC bool is_compatible_as_##side##_input(                                                 \
      const metal::cooperative_tensor<Element, Extents, Layout>&) const {                          \
    typedef cooperative_tensor_##side##_input_t<LeftElement, RightElement, ResultElement> Input;   \
    return is_same_spread<Input, OwnElement, Element, Layout>(about.transpose_##side);             \
  }                                                                                                \
  template <class LeftElement, class RightElement, class ResultElement, class Coordinate = int,    \
            class Element, class Extents, class Layout>                                            \
  METAL_FUNC auto get_##side##_input_cooperative_tensor(                                           \
      const metal::cooperative_tensor<Element, Extents, Layout>& source) const {                   \
    auto input = get_##side##_input_cooperative_tensor<LeftElement, RightElement, ResultElement,   \
                                                       Coordinate>();                              \
    if (!is_compatible_as_##side##_input<LeftElement, RightElement, ResultElement>(source))        \
      __msl_refuse_tensor("a " #side " input is copied from a tensor of an incompatible product"); \
    copy_slots(input, source);                                                                     \
    return input;                                                                                  \
  }
  __MSL_INPUT(left, LeftElement)
  __MSL_INPUT(right, RightElement)
#undef __MSL_INPUT

  template <class Left, class Right, class Destination>
  METAL_FUNC void run(Left& left, Right& right, Destination& destination) const {
    static_assert(__is_operand<Left> && __is_operand<Right> && __is_operand<Destination>,
                  "run takes tensors of tensor_inline and cooperative tensors");
    static_assert(__is_writable<Left> && __is_writable<Right> && __is_writable<Destination>,
                  "matmul2d does not accept tensors of const elements");
    typedef typename Left::value_type LeftElement;
    typedef typename Right::value_type RightElement;
    typedef typename Destination::value_type Element;
    check_elements<LeftElement, RightElement, Element>();
    if constexpr (__is_cooperative<Left>)
      static_assert(
          __is_same(Left, cooperative_tensor_left_input_t<LeftElement, RightElement, Element>),
          "the left operand belongs to another product");
    if constexpr (__is_cooperative<Right>)
      static_assert(
          __is_same(Right, cooperative_tensor_right_input_t<LeftElement, RightElement, Element>),
          "the right operand belongs to another product");
    if constexpr (__is_cooperative<Destination>)
      static_assert(__is_same(Destination, cooperative_tensor_destination_t<Left, Right, Element>),
                    "the destination belongs to another product");
    else
      static_assert(accumulates,
                    "it is not known whether multiply overwrites a tensor in memory: clear the "
                    "tensor and use multiply_accumulate, or use a cooperative destination");
    check_shape<Left, Right>();
    if constexpr (simdgroups == 0)
      run_alone(left, right, destination);
    else
      run_together(left, right, destination);
  }

 private:
  // If the operands are tensors in memory, K is padded with zeros to a multiple of this.
  template <class Left, class Right>
  static constexpr int step = __is_cooperative<Left> || __is_cooperative<Right> ? about.k
                              : is_dynamic || about.k % 32 == 0                 ? 32
                                                                                : 16;

  template <class Left, class Right>
  METAL_FUNC static int inner_size(const Left& left, const Right& right) {
    if constexpr (!is_dynamic) {
      return about.k;
    } else {
      int of_left = left.get_extent(about.transpose_left ? 1 : 0);
      int of_right = right.get_extent(about.transpose_right ? 0 : 1);
      return of_left < of_right ? of_left : of_right;
    }
  }

  template <class Left, class Right, class Destination>
  METAL_FUNC static void run_together(Left& left, Right& right, Destination& destination) {
    typedef typename Left::value_type LeftElement;
    typedef typename Right::value_type RightElement;
    typedef typename Destination::value_type Element;
    constexpr int inner = step<Left, Right>;
    typedef LeftOf<Matmul<LeftElement, RightElement>, LeftElement, inner> LeftInput;
    typedef RightOf<Matmul<LeftElement, RightElement>, RightElement, inner> RightInput;
    typedef Spread<void, Element, MSL_DESTINATION, false, about.m, about.n> Result;
    constexpr uint begin_right = LeftInput::layout::slots;
    constexpr uint begin_result = begin_right + RightInput::layout::slots;
    constexpr uint slots = begin_result + Result::layout::slots;
    static constexpr bool relaxed = about.relaxed_precision;
    static constexpr metal::__tensor_product first = {
        {simdgroups, (ulong)about.m * about.n * inner},
        about.m,
        about.n,
        inner,
        part_of<Left, LeftInput>(),
        part_of<Right, RightInput>(),
        part_of<Destination, Result>(),
        accumulates,
        relaxed && __is_same(LeftElement, float),
        relaxed && __is_same(RightElement, float)};
    static constexpr metal::__tensor_product further = first.added();
    static_assert(about.m * inner <= MSL_MOST_LEFT && inner * about.n <= MSL_MOST_RIGHT &&
                      about.m * about.n <= MSL_MOST_DESTINATION,
                  "the simulator does not support a product of this size");
    __attribute__((uninitialized)) float elements[slots];
    const int size = inner_size(left, right);
    if constexpr (accumulates)
      deposit<Result>(elements + begin_result, destination, {about.n, about.m, 0, 0});
    int done = 0;
    do {
      const bool of_left = about.transpose_left, of_right = about.transpose_right;
      const Window left_window = {of_left ? about.m : size, of_left ? size : about.m,
                                  of_left ? 0 : done, of_left ? done : 0};
      const Window right_window = {of_right ? size : about.n, of_right ? about.n : size,
                                   of_right ? done : 0, of_right ? 0 : done};
      deposit<LeftInput>(elements, left, left_window);
      deposit<RightInput>(elements + begin_right, right, right_window);
      __msl_tensor(&metal::__combine_product, elements, done ? &further : &first, done != 0);
      check_reads<LeftInput>(left, left_window);
      check_reads<RightInput>(right, right_window);
      done += inner;
    } while (done < size);
    for (uint i = 0; i < Result::layout::slots; ++i) {
      Element value = (Element)__msl_result(elements + begin_result + i);
      if constexpr (__is_cooperative<Destination>) {
        if (Result::layout::has_element(i)) destination.__elements[i] = value;
      } else {
        int at = piece_index(i), column = at % about.n, row = at / about.n;
        if (row < about.m && destination.__has(column, row)) *destination.__at(column, row) = value;
      }
    }
  }

  // The element of a tensor in memory that this thread handles in a slot.
  METAL_FUNC static int piece_index(uint slot) {
    return slot * threads + __msl_thread_in_scope(simdgroups);
  }
  template <class Tensor, class Stored>
  static constexpr metal::__tensor_part part_of() {
    metal::__tensor_part part = Stored::layout::part;
    part.is_cooperative = __is_cooperative<Tensor>;
    return part;
  }
  // An operand's part of a tensor. It begins at (x, y), and elements past (columns, rows) are 0.
  struct Window {
    int columns, rows, x, y;
  };
  // True if the operand's element `at` is in the tensor and its window. Also sets its position.
  template <class Stored, class Tensor>
  METAL_FUNC static bool is_in(const Tensor& tensor, Window window, int at, int& column, int& row) {
    column = window.x + at % Stored::layout::columns, row = window.y + at / Stored::layout::columns;
    return at < Stored::layout::rows * Stored::layout::columns && column < window.columns &&
           row < window.rows && tensor.__has(column, row);
  }
  // Passes this thread's elements of an operand to the engine.
  template <class Stored, class Tensor>
  METAL_FUNC static void deposit(float* to, Tensor& tensor, Window window) {
    for (uint i = 0; i < Stored::layout::slots; ++i) {
      if constexpr (__is_cooperative<Tensor>) {
        if (Stored::layout::has_element(i)) __msl_deposit(to + i, (float)tensor.__elements[i]);
      } else {
        int column, row;
        bool is_read = is_in<Stored>(tensor, window, piece_index(i), column, row);
        __msl_deposit(to + i, is_read ? (float)*tensor.__at(column, row) : 0.0f);
      }
    }
  }
  // It is unknown which thread of a GPU reads an element. So a second thread reads it too, of
  // another SIMD group if possible. At least one of the two is not the thread that wrote it.
  template <class Stored, class Tensor>
  METAL_FUNC static void check_reads(const Tensor& tensor, Window window) {
#ifdef MSL_UNDEFINED
    if constexpr (!__is_cooperative<Tensor>) {
      const uint thread_ = (__msl_thread_in_scope(simdgroups) + 33) % threads;
      for (uint i = 0; i < Stored::layout::slots; ++i) {
        int column, row;
        if (is_in<Stored>(tensor, window, i * threads + thread_, column, row))
          __msl_check((const void*)tensor.__at(column, row), sizeof(typename Tensor::value_type));
      }
    }
#endif
  }

  template <class Left, class Right, class Destination>
  METAL_FUNC static void run_alone(Left& left, Right& right, Destination& destination) {
    typedef typename Destination::value_type Element;
    constexpr bool cuts_left =
        about.relaxed_precision && __is_same(typename Left::value_type, float);
    constexpr bool cuts_right =
        about.relaxed_precision && __is_same(typename Right::value_type, float);
    const int size = inner_size(left, right);
    for (int row = 0; row < about.m; ++row) {
      for (int column = 0; column < about.n; ++column) {
        if (!destination.__has(column, row)) continue;
        float sum = (float)*destination.__at(column, row);
        for (int k = 0; k < size; ++k) {
          float a = element_of<about.transpose_left, cuts_left>(left, k, row);
          float b = element_of<about.transpose_right, cuts_right>(right, column, k);
          sum = __builtin_fmaf(a, b, sum);
        }
        *destination.__at(column, row) = (Element)sum;
      }
    }
  }
  template <bool IsTransposed, bool Cuts, class Tensor>
  METAL_FUNC static float element_of(const Tensor& tensor, int column, int row) {
    int x = IsTransposed ? row : column, y = IsTransposed ? column : row;
    float value = tensor.__has(x, y) ? (float)*tensor.__at(x, y) : 0.0f;
    return Cuts ? metal::__cut(value) : value;
  }

  template <class Input, class InputElement, class Element, class Layout>
  METAL_FUNC static bool is_same_spread(bool is_transposed) {
    typedef typename Input::layout Mine;
    constexpr bool fits = Layout::operand == MSL_DESTINATION && Layout::rows == Mine::rows &&
                          Layout::columns == Mine::columns && Layout::threads == Mine::threads &&
                          __is_same(InputElement, Element);
    if constexpr (fits)
      return !is_transposed && __msl_is_same_map(Mine::map(), Layout::map());
    else
      return false;
  }
  template <class Input, class Source>
  METAL_FUNC static void copy_slots(Input& input, const Source& source) {
    constexpr uint mine = Input::layout::slots, its = Source::layout::slots;
    for (uint i = 0; i < (mine < its ? mine : its); ++i)
      input.__elements[i] = (typename Input::element_type)source.__elements[i];
  }

  template <class LeftElement, class RightElement, class ResultElement>
  static constexpr void check_elements() {
    constexpr bool is_simulated = __is_simulated<LeftElement> && __is_simulated<RightElement> &&
                                  __is_simulated<ResultElement>;
    static_assert(is_simulated, "the simulator multiplies half, bfloat and float only");
    static_assert(!is_simulated || __multiplies<LeftElement, RightElement, ResultElement>,
                  "matmul2d or the simulator does not support this combination of element types");
  }
  template <class LeftElement, class RightElement, class ResultElement>
  static constexpr void check_input() {
    static_assert(__is_same(Scope, metal::execution_simdgroup),
                  "cooperative inputs need execution_simdgroup");
    static_assert(!is_dynamic, "cooperative inputs need a constant K, not dynamic_extent");
    check_elements<LeftElement, RightElement, ResultElement>();
  }
  template <class Left, class Right, class Element>
  static constexpr void check_destination() {
    static_assert(__is_operand<Left> && __is_operand<Right>,
                  "a destination needs the types of both operands (decltype, without an address "
                  "space), not their element types");
    static_assert(simdgroups > 0, "execution_thread has no cooperative tensors in the simulator");
    static_assert(__is_writable<Left> && __is_writable<Right>,
                  "matmul2d does not accept tensors of const elements");
    check_elements<typename __element_of<Left>::type, typename __element_of<Right>::type,
                   Element>();
    check_shape<Left, Right>();
  }
  template <class Left, class Right>
  static constexpr void check_shape() {
    constexpr int m = about.m, n = about.n, k = about.k;
    if constexpr (__is_cooperative<Left> && __is_cooperative<Right>) {
      static_assert(
          (m == 16 || m == 32) && (n == 16 || n == 32) && (k == 16 || k == 32) &&
              (m == 32 || n == 32 || k == 32),
          "with two cooperative inputs, M, N and K must be 16 or 32, and at least one 32");
    } else {
      static_assert(m > 0 && n > 0 && m % 8 == 0 && n % 8 == 0 && (m % 16 == 0 || n % 16 == 0),
                    "one of M and N must be a multiple of 16, and the other a multiple of 8");
      static_assert(is_dynamic || (k > 0 && k % 16 == 0),
                    "K must be dynamic_extent or a multiple of 16");
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp

#include <__msl_tensor_reduce.h>
