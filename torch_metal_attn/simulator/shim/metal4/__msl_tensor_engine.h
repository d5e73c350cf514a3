// The functions by which tensor operations call the engine, in addition to those of __msl_engine.h.
#pragma once
#include <__msl_engine.h>

namespace metal {

// A matrix of a tensor operation, and how its elements are distributed over the threads.
struct __tensor_part {
  bool is_cooperative;  // distributed by a lane map; otherwise thread i % threads holds element i
  uint operand;         // an __msl_operand
  uint is_transposed;
  uint rows, columns;  // as stored
  uint simdgroups;
};

}  // namespace metal

extern "C" {

MSL_ENTRY METAL_CONST const __msl_lane_map* __msl_map(const metal::__tensor_part* part) {
  return __msl_table->lane_map(part->operand, part->is_transposed, part->rows, part->columns,
                               part->simdgroups);
}
// This thread's number in the scope of an operation.
MSL_ENTRY METAL_CONST uint __msl_thread_in_scope(uint simdgroups) {
  const __msl_thread* thread_ = __msl_this_thread();
  return simdgroups == 1 ? thread_->lane : thread_->index;
}
MSL_INTERNAL inline const uint* __msl_elements(const __msl_lane_map* map, uint simdgroups) {
  return map->elements + __msl_thread_in_scope(simdgroups) * map->capacity;
}
// The element in a slot of this thread.
MSL_ENTRY METAL_CONST uint __msl_element(const __msl_lane_map* map, uint simdgroups, uint slot) {
  return slot < map->capacity ? __msl_elements(map, simdgroups)[slot] : MSL_NO_ELEMENT;
}
// The slot in which this thread holds an element, or the capacity if it does not hold it.
MSL_ENTRY METAL_CONST uint __msl_slot_of(const __msl_lane_map* map, uint simdgroups, uint element) {
  const uint* elements = __msl_elements(map, simdgroups);
  uint slot = 0;
  while (slot < map->capacity && elements[slot] != element) ++slot;
  return slot;
}
MSL_ENTRY METAL_CONST uint __msl_capacity(const __msl_lane_map* map) { return map->capacity; }
MSL_ENTRY METAL_CONST uint __msl_index_is_logical() { return __msl_this_worker()->is_logical; }
MSL_ENTRY METAL_CONST uint __msl_is_same_map(const __msl_lane_map* a, const __msl_lane_map* b) {
  return a->capacity == b->capacity &&
         !__builtin_memcmp(a->elements, b->elements, 4ul * MSL_SIMD_WIDTH * a->capacity);
}
MSL_ENTRY void __msl_refuse_tensor(const char* reason) {
  __msl_table->undefined(MSL_TENSOR_USE, reason, 0, 0, ~0u);
}

// A thread deposits its elements for the engine and reads the results. These are not accesses of
// the kernel, but the deposited value must have been written.
MSL_ENTRY void __msl_deposit(float* to, float value) { *to = value; }
MSL_ENTRY float __msl_result(const float* from) { return *from; }
// Checks a read that a thread of a GPU may make, but does not count it.
MSL_ENTRY void __msl_check(const void* address, uint bytes) {
  __msl_table->access(address, bytes, MSL_READ | MSL_UNCOUNTED, ~0u);
}
// The last thread of the scope to arrive combines the elements of all threads.
MSL_ENTRY void __msl_tensor(__msl_combine combine, float* elements,
                            const __msl_tensor_operation* operation, uint is_further) {
  __msl_table->tensor(combine, elements, operation, is_further, __builtin_return_address(0));
}

}  // extern "C"

namespace metal {

template <class Element>
METAL_FUNC void __mark_unwritten(Element& element) {
#ifdef MSL_UNDEFINED
  element = __unset_value<Element>("an element outside of the extents of load()");
#else
  (void)element;
#endif
}

}  // namespace metal
