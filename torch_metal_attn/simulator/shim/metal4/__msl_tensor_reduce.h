// MetalPerformancePrimitives: reductions of a product's destination.
#pragma once
#include <__msl_cooperative.h>
#include <__msl_tensor_combine.h>

namespace mpp {
namespace tensor_ops {

enum class reduction_operation { sum, max, min };

template <class Element>
struct reduction_operation_identity {
  static constexpr constant Element sum_identity = (Element)0;
  static constexpr constant Element max_identity = metal::numeric_limits<Element>::lowest();
  static constexpr constant Element min_identity = metal::numeric_limits<Element>::max();
};

template <uint Operand, class Source, class Destination>
METAL_FUNC void __reduce_tensor(Source& source, Destination& destination, reduction_operation op,
                                typename Source::element_type identity) {
  typedef typename Source::layout From;
  typedef typename Destination::layout To;
  static_assert(From::operand == MSL_DESTINATION, "only a product's destination can be reduced");
  static_assert(From::threads == 32, "reductions need a single SIMD group");
  static_assert(
      To::operand == Operand && __is_same(typename From::operation, typename To::operation),
      "the result must be a reduction destination of the same product");
  static constexpr metal::__tensor_reduction reduction = {{1, 0}, From::part, To::part};
  __attribute__((uninitialized)) float elements[2 + From::slots + To::slots];
  __msl_deposit(elements, op == reduction_operation::sum   ? metal::MSL_SUM
                          : op == reduction_operation::max ? metal::MSL_MAX
                                                           : metal::MSL_MIN);
  __msl_deposit(elements + 1, (float)identity);
  for (uint i = 0; i < From::slots; ++i)
    __msl_deposit(elements + 2 + i, (float)source.__elements[i]);
  __msl_tensor(&metal::__combine_tensor_reduction, elements, &reduction, 0);
  for (uint i = 0; i < To::slots; ++i) {
    if (i < destination.get_capacity())
      destination.__elements[i] =
          (typename Source::element_type)__msl_result(elements + 2 + From::slots + i);
  }
}

// The default identity of a maximum is also 0, as in Apple's headers.
#define __MSL_REDUCE(name, operand)                                                    \
  template <class Element, class FromExtents, class ToExtents, class From, class To>   \
  METAL_FUNC void name(metal::cooperative_tensor<Element, FromExtents, From>& source,  \
                       metal::cooperative_tensor<Element, ToExtents, To>& destination, \
                       reduction_operation op = reduction_operation::sum,              \
                       Element identity = (Element)0) {                                \
    __reduce_tensor<operand>(source, destination, op, identity);                       \
  }
__MSL_REDUCE(reduce_rows, MSL_ROWS)
__MSL_REDUCE(reduce_columns, MSL_COLUMNS)
#undef __MSL_REDUCE

}  // namespace tensor_ops
}  // namespace mpp
