// metal_tensor: views of device and threadgroup memory as matrices.
#pragma once
#include <__msl_simd.h>
#include <__msl_traits.h>

namespace metal {

constexpr constant size_t dynamic_extent = (size_t)-1;

// The sizes of a tensor, innermost first.
template <class Index, size_t... Sizes>
struct extents {
  typedef Index index_type;
  static constexpr size_t __rank = sizeof...(Sizes);
  static constexpr size_t __dynamic = ((Sizes == dynamic_extent) + ... + 0);

  // Takes the dynamic sizes, or all sizes.
  template <class... Values>
  constexpr extents(Values... sizes) : __sizes{} {
    constexpr size_t count = sizeof...(Values);
    static_assert(count == __dynamic || count == __rank,
                  "extents take a size for each dynamic extent");
    const Index all[__rank] = {(Index)Sizes...};
    const Index values[count + 1] = {(Index)sizes...};
    for (size_t i = 0, next = 0; i < __rank; ++i) {
      bool is_value = count == __rank || all[i] == (Index)dynamic_extent;
      __sizes[i] = is_value ? values[next++] : all[i];
    }
  }
  static constexpr size_t rank() { return __rank; }
  static constexpr size_t rank_dynamic() { return __dynamic; }
  constexpr Index extent(size_t dimension) const { return __sizes[dimension]; }

  Index __sizes[__rank];
};
template <class Index, Index... values>
struct __dimensions {};
template <class Index, size_t Rank, class = __make_integer_seq<__dimensions, size_t, Rank>>
struct __all_dynamic;
template <class Index, size_t Rank, size_t... Dimensions>
struct __all_dynamic<Index, Rank, __dimensions<size_t, Dimensions...>> {
  typedef extents<Index, (Dimensions, dynamic_extent)...> type;
};
template <class Index, size_t Rank>
using dextents = typename __all_dynamic<Index, Rank>::type;

struct tensor_handle {};  // a kernel's argument, which the simulator does not support
struct tensor_inline {};  // made from a pointer

template <class Element, class Extents, class Descriptor = tensor_handle, class... Planes>
class tensor {
  static_assert(__is_same(Descriptor, tensor_inline) && sizeof...(Planes) == 0,
                "the simulator supports tensor_inline only: make the tensor from a pointer");
};

template <class Element, class Extents>
class tensor<Element, Extents, tensor_inline> {
 public:
  typedef Element element_type;
  typedef remove_cv_t<Element> value_type;
  typedef Extents extents_type;
  typedef typename Extents::index_type index_type;
  typedef array<index_type, Extents::__rank> strides_type;

  METAL_FUNC tensor(Element* data, Extents sizes) : __data(data), __sizes(sizes) {
    index_type stride = 1;
    for (size_t i = 0; i < Extents::__rank; ++i) {
      __strides[i] = stride;
      stride *= sizes.extent(i);
    }
  }
  METAL_FUNC tensor(Element* data, Extents sizes, strides_type strides)
      : __data(data), __sizes(sizes), __strides(strides) {}

  static constexpr size_t get_rank() { return Extents::__rank; }
  METAL_FUNC Extents get_extents() const { return __sizes; }
  METAL_FUNC index_type get_extent(size_t dimension) const { return __sizes.extent(dimension); }
  METAL_FUNC index_type get_stride(size_t dimension) const { return __strides[dimension]; }

  // The view that begins at `offsets`. Each extent is what is left of it, but at most `Most`.
  template <size_t... Most, class... Offsets>
  METAL_FUNC auto slice(Offsets... offsets) const {
    constexpr size_t rank = Extents::__rank;
    static_assert(sizeof...(Offsets) == rank, "slice takes an offset for each dimension");
    static_assert(sizeof...(Most) == 0 || sizeof...(Most) == rank,
                  "slice takes a size for each dimension");
    const index_type from[rank] = {(index_type)offsets...};
    const size_t most[rank + 1] = {Most...};
    dextents<index_type, rank> sizes =
        __left(from, __make_integer_seq<__dimensions, size_t, rank>());
    Element* data = __data;
    for (size_t i = 0; i < rank; ++i) {
      data += (long)from[i] * __strides[i];
      bool is_less = sizeof...(Most) && most[i] != dynamic_extent;
      if (is_less && (index_type)most[i] < sizes.__sizes[i]) sizes.__sizes[i] = most[i];
    }
    return tensor<Element, dextents<index_type, rank>, tensor_inline>(data, sizes, __strides);
  }

  // True if the extents contain an element.
  METAL_FUNC bool __has(int column, int row) const {
    static_assert(Extents::__rank <= 2, "tensor operations take tensors of rank 1 and 2");
    if (column < 0 || column >= __sizes.extent(0)) return false;
    if constexpr (Extents::__rank == 1)
      return row == 0;
    else
      return row >= 0 && row < __sizes.extent(1);
  }
  METAL_FUNC Element* __at(int column, int row) const {
    Element* first = __data + (long)column * __strides[0];
    if constexpr (Extents::__rank == 1)
      return first;
    else
      return first + (long)row * __strides[1];
  }

  Element* __data;
  Extents __sizes;
  strides_type __strides;

 private:
  template <size_t... Dimensions>
  METAL_FUNC dextents<index_type, Extents::__rank> __left(
      const index_type* from, __dimensions<size_t, Dimensions...>) const {
    return {(index_type)(__sizes.extent(Dimensions) - from[Dimensions])...};
  }
};
template <class Element, class Extents>
tensor(Element*, Extents) -> tensor<Element, Extents, tensor_inline>;
template <class Element, class Extents, class Strides>
tensor(Element*, Extents, Strides) -> tensor<Element, Extents, tensor_inline>;

}  // namespace metal
