// The functions by which a kernel's entry computes the kernel's arguments.
#pragma once
#include <__msl_engine.h>
#include <__msl_parameters.h>

namespace metal {

template <class F>
struct __signature;
template <class R, class... P>
struct __signature<R(P...)> {
  template <int i>
  using parameter = __type_pack_element<i, P...>;
};

template <class P>
METAL_FUNC P __pointer_argument(void* pointer) {
  if constexpr (__is_reference(P))
    return *(__remove_reference_t(P)*)(ulong)pointer;
  else
    return (P)(ulong)pointer;
}
template <class P>
METAL_FUNC P __buffer_argument(const __msl_launch* launch, int index) {
  return __pointer_argument<P>(launch->buffers[index]);
}
template <class P>
METAL_FUNC P __threadgroup_argument(const __msl_launch* launch, int index) {
  return __pointer_argument<P>(launch->threadgroup_memory[index]);
}

// A built-in attribute, converted to its parameter's type. A scalar parameter gets x.
template <class P>
METAL_FUNC P __attribute_value(uint x, uint y, uint z) {
  typedef __remove_cvref(P) V;
  V v{};
  if constexpr (!__is_vector<V>) {
    v = (V)x;
  } else {
    const uint all[3] = {x, y, z};
    for (int i = 0; i < __length<V>; ++i) v[i] = (__element<V>)all[i];
  }
  return v;
}
#define __MSL_ATTRIBUTE(name, x, y, z)                                                       \
  template <class P>                                                                         \
  METAL_FUNC P __attribute_##name(const __msl_launch* launch, const __msl_thread* thread_) { \
    (void)launch;                                                                            \
    (void)thread_;                                                                           \
    return __attribute_value<P>(x, y, z);                                                    \
  }
#define __MSL_ATTRIBUTE3(name, from) __MSL_ATTRIBUTE(name, (from)[0], (from)[1], (from)[2])
#define __MSL_IN_GRID(i) (launch->position[i] * launch->dispatch_threads[i] + thread_->position[i])
__MSL_ATTRIBUTE(thread_position_in_grid, __MSL_IN_GRID(0), __MSL_IN_GRID(1), __MSL_IN_GRID(2))
__MSL_ATTRIBUTE3(threadgroup_position_in_grid, launch->position)
__MSL_ATTRIBUTE3(thread_position_in_threadgroup, thread_->position)
__MSL_ATTRIBUTE3(threads_per_threadgroup, launch->threads)
__MSL_ATTRIBUTE3(dispatch_threads_per_threadgroup, launch->dispatch_threads)
__MSL_ATTRIBUTE3(threadgroups_per_grid, launch->threadgroups)
__MSL_ATTRIBUTE3(threads_per_grid, launch->grid)
__MSL_ATTRIBUTE(thread_index_in_threadgroup, thread_->index, 0, 0)
__MSL_ATTRIBUTE(thread_index_in_simdgroup, thread_->lane, 0, 0)
__MSL_ATTRIBUTE(simdgroup_index_in_threadgroup, thread_->simdgroup, 0, 0)
__MSL_ATTRIBUTE(simdgroups_per_threadgroup, launch->simdgroups, 0, 0)
__MSL_ATTRIBUTE(
    dispatch_simdgroups_per_threadgroup,
    (launch->dispatch_threads[0] * launch->dispatch_threads[1] * launch->dispatch_threads[2] + 31) /
        32,
    0, 0)
__MSL_ATTRIBUTE(threads_per_simdgroup, MSL_SIMD_WIDTH, 0, 0)
__MSL_ATTRIBUTE(thread_execution_width, MSL_SIMD_WIDTH, 0, 0)
__MSL_ATTRIBUTE(thread_index_in_quadgroup, thread_->lane % 4, 0, 0)
__MSL_ATTRIBUTE(quadgroup_index_in_threadgroup, thread_->index / 4, 0, 0)
__MSL_ATTRIBUTE(quadgroups_per_threadgroup,
                (launch->threads[0] * launch->threads[1] * launch->threads[2] + 3) / 4, 0, 0)
__MSL_ATTRIBUTE(grid_origin, 0, 0, 0)
#undef __MSL_ATTRIBUTE
#undef __MSL_ATTRIBUTE3
#undef __MSL_IN_GRID

}  // namespace metal
