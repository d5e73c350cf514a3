// The part of metal_simdgroup that does not depend on the engine: the operations of reductions, the
// flags of barriers and the type of votes.
#pragma once
#include <__msl_math.h>
#include <__msl_traits.h>

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((uint)a | (uint)b);
}
METAL_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return (mem_flags)((uint)a & (uint)b);
}

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

template <class T>
struct __add {
  METAL_FUNC static T apply(T a, T b) { return a + b; }
  METAL_FUNC static T identity() { return (T)0; }
};
template <class T>
struct __multiply {
  METAL_FUNC static T apply(T a, T b) { return a * b; }
  METAL_FUNC static T identity() { return (T)1; }
};
// Bitwise operations work on any type, as MLX declares them for bfloat as well.
#define __MSL_BITWISE(name, operation)                                                      \
  template <class T>                                                                        \
  struct name {                                                                             \
    METAL_FUNC static T apply(T a, T b) {                                                   \
      __bits<T> x = __builtin_bit_cast(__bits<T>, a), y = __builtin_bit_cast(__bits<T>, b); \
      return __builtin_bit_cast(T, (__bits<T>)(x operation y));                             \
    }                                                                                       \
  };
__MSL_BITWISE(__and, &)
__MSL_BITWISE(__or, |)
__MSL_BITWISE(__xor, ^)
#undef __MSL_BITWISE
template <class T>
struct __largest {
  METAL_FUNC static T apply(T a, T b) { return metal::max(a, b); }
};
template <class T>
struct __smallest {
  METAL_FUNC static T apply(T a, T b) { return metal::min(a, b); }
};

struct simd_vote {
  typedef ulong vote_t;
  simd_vote() {}
  explicit constexpr simd_vote(vote_t v) : __bits(v) {}
  explicit constexpr operator vote_t() const { return __bits; }
  bool all() const { return (uint)__bits == ~0u; }
  bool any() const { return (uint)__bits != 0; }
  vote_t __bits;
};

}  // namespace metal
