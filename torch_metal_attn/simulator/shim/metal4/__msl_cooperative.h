// metal_cooperative_tensor: a matrix whose elements are spread over the lanes of an operation.
#pragma once
#include <__msl_tensor.h>

namespace metal {

// Which threads do a tensor operation together.
struct execution_thread {};
template <int Count>
struct execution_simdgroups {
  static_assert(Count > 0, "execution_simdgroups needs a SIMD group");
};
typedef execution_simdgroups<1> execution_simdgroup;

}  // namespace metal

extern "C" {
MSL_ENTRY METAL_CONST const __msl_lane_map* __msl_lane_map_of(uint operand, uint is_transposed,
                                                              uint rows, uint columns,
                                                              uint simdgroups) {
  return __msl_table->lane_map(operand, is_transposed, rows, columns, simdgroups);
}
// What a thread keeps in a slot, and how many slots it has.
MSL_ENTRY METAL_CONST uint __msl_element(const __msl_lane_map* map, uint simdgroups, uint slot) {
  const __msl_thread* thread_ = __msl_this_thread();
  uint index = simdgroups == 1 ? thread_->lane : thread_->index;
  return slot < map->capacity ? map->element[index * map->capacity + slot] : MSL_NO_ELEMENT;
}
MSL_ENTRY METAL_CONST uint __msl_capacity(const __msl_lane_map* map) { return map->capacity; }
MSL_ENTRY METAL_CONST uint __msl_index_is_logical() { return __msl_this_worker()->is_logical; }
}

namespace metal {

// Where a cooperative tensor's elements are. `Operation` is what it belongs to.
template <class Operation, uint Operand, bool IsTransposed, int Rows, int Columns, int SimdGroups>
struct __spread {
  typedef Operation operation;
  static constexpr uint operand = Operand;
  static constexpr bool is_transposed = IsTransposed;
  static constexpr int rows = Rows, columns = Columns, simdgroups = SimdGroups;
  static constexpr bool reduces = Operand == MSL_ROWS || Operand == MSL_COLUMNS;
  static constexpr int threads = 32 * SimdGroups;
  // Of reductions the most that a lane map may need.
  static constexpr int slots = reduces ? Rows * Columns : (Rows * Columns + threads - 1) / threads;
  METAL_FUNC static const __msl_lane_map* map() {
    return __msl_lane_map_of(Operand, IsTransposed, Rows, Columns, SimdGroups);
  }
  METAL_FUNC static uint element(uint slot) { return __msl_element(map(), SimdGroups, slot); }
};

template <class Element, class Extents, class Layout>
class cooperative_tensor {
 public:
  typedef Element element_type;
  typedef Element value_type;
  typedef Extents extents_type;
  typedef Layout layout;
  typedef array<int, Layout::reduces ? 1 : 2> __index;

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
  METAL_FUNC __index get_multidimensional_index(uint slot) const {
    uint at = Layout::element(slot);
    int row = at >> 16, column = at & 0xFFFF;
    if constexpr (Layout::operand == MSL_ROWS) {
      return {row};
    } else if constexpr (Layout::operand == MSL_COLUMNS) {
      return {column};
    } else if (Layout::is_transposed && __msl_index_is_logical()) {
      return {row, column};
    } else {
      return {column, row};
    }
  }

  Element __elements[Layout::slots];
};

}  // namespace metal
