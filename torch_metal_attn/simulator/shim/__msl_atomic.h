// metal_atomic. Threadgroups run on several host threads, so these are the host's atomics.
#pragma once
#include <__msl_simd.h>

extern "C" {
#ifdef MSL_CHECKED
// Reports the access to the checks, because the operation itself is not instrumented.
MSL_ENTRY void __msl_atomic_access(const volatile void* address, uint bytes, uint flags) {
  __msl_table->access((const void*)address, bytes, flags | MSL_ATOMIC, ~0u);
}
MSL_ENTRY void __msl_atomic_observe(const volatile void* address) {
  __msl_table->observe((const void*)address);
}
MSL_ENTRY void __msl_fence(uint flags, uint local) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  __msl_table->fence(flags, local);
}
#else
MSL_LOOKUP void __msl_atomic_access(const volatile void*, uint, uint) {}
MSL_LOOKUP void __msl_atomic_observe(const volatile void*) {}
static inline void __msl_fence(uint, uint) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif
// Lets other threads run while this thread waits for one of them.
MSL_ENTRY void __msl_spin() { __msl_table->spin(); }
}

namespace metal {

template <class T>
struct _atomic {
  T __value;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<int> atomic_int;
typedef _atomic<uint> atomic_uint;
typedef _atomic<bool> atomic_bool;
typedef _atomic<float> atomic_float;
typedef _atomic<ulong> atomic_ulong;

// The operations work on the bits of a value, because Metal compares bits.
template <class T>
MSL_INTERNAL T __atomic_read(ulong address) {
  return __builtin_bit_cast(T, __atomic_load_n((__bits<T>*)address, __ATOMIC_SEQ_CST));
}
template <class T>
MSL_INTERNAL void __atomic_write(ulong address, T value) {
  __msl_progress();
  __atomic_store_n((__bits<T>*)address, __builtin_bit_cast(__bits<T>, value), __ATOMIC_SEQ_CST);
}
template <class T>
MSL_INTERNAL bool __atomic_swap_if(ulong address, T* expected, T desired) {
  typedef __bits<T> Bits;
  Bits old = __builtin_bit_cast(Bits, *expected);
#ifdef MSL_CHECKED
  if (__msl_table->weak_fails()) {
    *expected = __atomic_read<T>(address);
    return false;
  }
#endif
  bool done = __atomic_compare_exchange_n((Bits*)address, &old, __builtin_bit_cast(Bits, desired),
                                          false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  *expected = __builtin_bit_cast(T, old);
  if (done) __msl_progress();
  return done;
}
template <class T>
struct __replace {
  static T apply(T, T b) { return b; }
};
template <class T>
struct __subtract {
  static T apply(T a, T b) { return a - b; }
};
template <class T, template <class> class Op>
MSL_INTERNAL T __atomic_update(ulong address, T operand) {
  typedef __bits<T> Bits;
  Bits old = __atomic_load_n((Bits*)address, __ATOMIC_SEQ_CST), fresh;
  __msl_progress();
  do {
    fresh = __builtin_bit_cast(Bits, Op<T>::apply(__builtin_bit_cast(T, old), operand));
  } while (!__atomic_compare_exchange_n((Bits*)address, &old, fresh, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST));
  return __builtin_bit_cast(T, old);
}

template <class T>
constexpr void __check_atomic_width() {
  static_assert(sizeof(T) <= 4,
                "64-bit atomics have only atomic_min_explicit and atomic_max_explicit, in device "
                "memory");
}

#define __MSL_UPDATE(space, name, Op)                                                              \
  template <class T>                                                                               \
  METAL_FUNC T name(volatile space _atomic<T>* object, type_identity_t<T> operand, memory_order) { \
    __check_atomic_width<T>();                                                                     \
    __msl_atomic_access((const volatile void*)(ulong)object, sizeof(T), MSL_UPDATE);               \
    T old = __atomic_update<T, Op>((ulong)object, operand);                                        \
    __msl_atomic_observe((const volatile void*)(ulong)object);                                     \
    return old;                                                                                    \
  }
#define __MSL_ATOMICS(space)                                                                     \
  template <class T>                                                                             \
  METAL_FUNC T atomic_load_explicit(const volatile space _atomic<T>* object, memory_order) {     \
    __check_atomic_width<T>();                                                                   \
    __msl_spin();                                                                                \
    __msl_atomic_access((const volatile void*)(ulong)object, sizeof(T), MSL_READ);               \
    T value = __atomic_read<T>((ulong)object);                                                   \
    __msl_atomic_observe((const volatile void*)(ulong)object);                                   \
    return value;                                                                                \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC void atomic_store_explicit(volatile space _atomic<T>* object,                       \
                                        type_identity_t<T> value, memory_order) {                \
    __check_atomic_width<T>();                                                                   \
    __msl_atomic_access((const volatile void*)(ulong)object, sizeof(T), MSL_WRITE);              \
    __atomic_write<T>((ulong)object, value);                                                     \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile space _atomic<T>* object,       \
                                                        T* expected, type_identity_t<T> desired, \
                                                        memory_order, memory_order) {            \
    __check_atomic_width<T>();                                                                   \
    __msl_atomic_access((const volatile void*)(ulong)object, sizeof(T), MSL_UPDATE);             \
    bool done = __atomic_swap_if<T>((ulong)object, expected, desired);                           \
    __msl_atomic_observe((const volatile void*)(ulong)object);                                   \
    if (!done) __msl_spin();                                                                     \
    return done;                                                                                 \
  }                                                                                              \
  __MSL_UPDATE(space, atomic_exchange_explicit, __replace)                                       \
  __MSL_UPDATE(space, atomic_fetch_add_explicit, __add)                                          \
  __MSL_UPDATE(space, atomic_fetch_sub_explicit, __subtract)                                     \
  __MSL_UPDATE(space, atomic_fetch_and_explicit, __and)                                          \
  __MSL_UPDATE(space, atomic_fetch_or_explicit, __or)                                            \
  __MSL_UPDATE(space, atomic_fetch_xor_explicit, __xor)                                          \
  __MSL_UPDATE(space, atomic_fetch_min_explicit, __smallest)                                     \
  __MSL_UPDATE(space, atomic_fetch_max_explicit, __largest)
__MSL_EACH_WRITABLE(__MSL_ATOMICS)
#undef __MSL_ATOMICS
#undef __MSL_UPDATE

// These functions also support 64-bit atomics.
#define __MSL_EXTREME(name, Op)                                                        \
  template <class T>                                                                   \
  METAL_FUNC void name(volatile device _atomic<T>* object, type_identity_t<T> operand, \
                       memory_order) {                                                 \
    __msl_atomic_access((const volatile void*)(ulong)object, sizeof(T), MSL_UPDATE);   \
    __atomic_update<T, Op>((ulong)object, operand);                                    \
    __msl_atomic_observe((const volatile void*)(ulong)object);                         \
  }
__MSL_EXTREME(atomic_min_explicit, __smallest)
__MSL_EXTREME(atomic_max_explicit, __largest)
#undef __MSL_EXTREME

#if __METAL_VERSION__ >= 320
METAL_FUNC void atomic_thread_fence(mem_flags flags, memory_order order,
                                    thread_scope scope = thread_scope_device) {
  if (order != memory_order_relaxed && scope != thread_scope_thread) {
    __msl_fence((uint)flags, scope < thread_scope_device);
  }
}
#endif

}  // namespace metal

#define ATOMIC_VAR_INIT(value) {value}
