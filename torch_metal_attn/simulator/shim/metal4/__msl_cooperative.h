// metal_cooperative_tensor: a matrix that is distributed over the threads of an operation.
#pragma once
#include <__msl_tensor.h>
#include <__msl_tensor_engine.h>

namespace metal {

// The distribution of a cooperative tensor's elements. It belongs to an `Operation`.
template <class Operation, uint Operand, bool IsTransposed, int Rows, int Columns, int SimdGroups>
struct __spread {
  typedef Operation operation;
  static constexpr uint operand = Operand;
  static constexpr int rows = Rows, columns = Columns;  // as they are stored
  static constexpr bool is_transposed = IsTransposed;
  static constexpr int simdgroups = SimdGroups;
  static constexpr bool reduces = Operand == MSL_ROWS || Operand == MSL_COLUMNS;
  static constexpr int threads = 32 * SimdGroups;
  // A reduction's destination has as many slots as any lane map needs.
  static constexpr int slots = reduces ? Rows * Columns : (Rows * Columns + threads - 1) / threads;
  static constexpr __tensor_part part = {true, Operand, IsTransposed, Rows, Columns, SimdGroups};

  METAL_FUNC static const __msl_lane_map* map() { return __msl_map(&part); }
  METAL_FUNC static uint element(uint slot) { return __msl_element(map(), SimdGroups, slot); }
  // True if a slot has an element. All threads together may have more slots than there are
  // elements.
  METAL_FUNC static bool has_element(uint slot) {
    return Rows * Columns == slots * threads || element(slot) != MSL_NO_ELEMENT;
  }
};

template <class Tensor>
class __tensor_iterator {
 public:
  METAL_FUNC __tensor_iterator(Tensor* of, uint slot) : __of(of), __slot(slot) {}
  METAL_FUNC auto& operator*() const { return (*__of)[__slot]; }
  METAL_FUNC bool is_valid_element() const { return __of->is_valid_element(__slot); }
  METAL_FUNC auto get_multidimensional_index() const {
    return __of->get_multidimensional_index(__slot);
  }
  METAL_FUNC __tensor_iterator& operator++() {
    ++__slot;
    return *this;
  }
  METAL_FUNC __tensor_iterator operator++(int) { return {__of, __slot++}; }
  METAL_FUNC bool operator==(__tensor_iterator other) const { return __slot == other.__slot; }
  METAL_FUNC bool operator!=(__tensor_iterator other) const { return __slot != other.__slot; }

  Tensor* __of;
  uint __slot;
};

template <class Element, class Extents, class Layout>
class cooperative_tensor {
 public:
  typedef Element element_type;
  typedef Element value_type;
  typedef Extents extents_type;
  typedef Layout layout;
  typedef __tensor_iterator<cooperative_tensor> iterator;
  typedef __tensor_iterator<const cooperative_tensor> const_iterator;

  METAL_FUNC uint16_t get_capacity() const {
    if constexpr (Layout::reduces)
      return __msl_capacity(Layout::map());
    else
      return Layout::slots;
  }
  METAL_FUNC Element& operator[](uint slot) { return __elements[slot]; }
  METAL_FUNC const Element& operator[](uint slot) const { return __elements[slot]; }
  METAL_FUNC bool is_valid_element(uint slot) const {
    return Layout::element(slot) != MSL_NO_ELEMENT;
  }
  // Unlike [], these are checked. If the slot has no element, get returns 0 and set does nothing.
  METAL_FUNC Element get(uint slot) const {
    return is_valid_element(slot) ? __elements[slot] : (Element)0;
  }
  METAL_FUNC void set(uint slot, Element value) {
    if (is_valid_element(slot)) __elements[slot] = value;
  }
  METAL_FUNC array<int, Layout::reduces ? 1 : 2> get_multidimensional_index(uint slot) const {
    uint at = Layout::element(slot);
    int row = at >> 16, column = at & 0xFFFF;
    if constexpr (Layout::operand == MSL_ROWS) {
      return {row};
    } else if constexpr (Layout::operand == MSL_COLUMNS) {
      return {column};
    } else {
      if (Layout::is_transposed && __msl_index_is_logical()) return {row, column};
      return {column, row};
    }
  }

  METAL_FUNC iterator begin() { return {this, 0}; }
  METAL_FUNC iterator end() { return {this, get_capacity()}; }
  METAL_FUNC const_iterator begin() const { return {this, 0}; }
  METAL_FUNC const_iterator end() const { return {this, get_capacity()}; }
  METAL_FUNC iterator get_iterator(uint slot) { return {this, slot}; }
  METAL_FUNC const_iterator get_iterator(uint slot) const { return {this, slot}; }
  // An iterator at this tensor's element in the row or column of `other`.
  template <class Other>
  METAL_FUNC iterator map_iterator(__tensor_iterator<Other> other) {
    return {this, slot_of(other)};
  }
  template <class Other>
  METAL_FUNC const_iterator map_iterator(__tensor_iterator<Other> other) const {
    return {this, slot_of(other)};
  }

  // load and store use the matrix as stored and do not convert elements. An element outside of the
  // extents is not stored, and load leaves it unwritten.
  template <class Memory, class Sizes>
  METAL_FUNC void load(const tensor<Memory, Sizes, tensor_inline>& from) {
    static_assert(__is_same(remove_cv_t<Memory>, Element), "load does not convert elements");
    for (uint i = 0; i < get_capacity(); ++i) {
      int column, row;
      if (is_in(from, i, column, row))
        __elements[i] = *from.__at(column, row);
      else
        __mark_unwritten(__elements[i]);
    }
  }
  template <class Memory, class Sizes>
  METAL_FUNC void store(const tensor<Memory, Sizes, tensor_inline>& to) const {
    static_assert(__is_same(Memory, device Element) || __is_same(Memory, threadgroup Element),
                  "store needs elements of the same type, in device or threadgroup memory");
    for (uint i = 0; i < get_capacity(); ++i) {
      int column, row;
      if (is_in(to, i, column, row)) *to.__at(column, row) = __elements[i];
    }
  }

  Element __elements[Layout::slots];

 private:
  template <class Memory, class Sizes>
  METAL_FUNC static bool is_in(const tensor<Memory, Sizes, tensor_inline>& memory, uint slot,
                               int& column, int& row) {
    uint at = Layout::element(slot);
    // The elements of a reduction form a row.
    column = Layout::operand == MSL_ROWS ? at >> 16 : at & 0xFFFF;
    row = Layout::reduces ? 0 : at >> 16;
    return at != MSL_NO_ELEMENT && memory.__has(column, row);
  }
  template <class Other>
  METAL_FUNC static uint slot_of(__tensor_iterator<Other> other) {
    typedef typename Other::layout From;
    static_assert(__is_same(typename Layout::operation, typename From::operation),
                  "map_iterator takes an iterator of a tensor of the same product");
    uint wanted = From::element(other.__slot);
    uint mask = Layout::operand == MSL_ROWS      ? 0xFFFF0000u
                : Layout::operand == MSL_COLUMNS ? 0xFFFFu
                                                 : ~0u;
    return __msl_slot_of(Layout::map(), Layout::simdgroups, wanted & mask);
  }
};

// True if `destination.map_iterator` has an element for each element of `source`.
template <class Source, class Destination>
METAL_FUNC bool is_iterator_compatible(const Source&, const Destination&) {
  return __is_same(typename Source::layout::operation, typename Destination::layout::operation);
}

}  // namespace metal
