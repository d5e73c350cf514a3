// Reads and stores of whole structs in device, threadgroup and constant memory. The rewriter calls
// these, because C++ has no constructors and no assignment for objects in an address space.
#pragma once
#include <__msl_packed.h>

namespace metal {

template <class T>
constexpr bool __is_struct = __is_class(T) || __is_union(T);

#ifdef MSL_UNDEFINED
// Hides a copied struct from the search for unwritten values, because its padding is unwritten.
MSL_INTERNAL inline void __copy_padded(void* to, const void* from, ulong bytes) {
  __builtin_memcpy(to, from, bytes);
}
#endif
// The left side of `p[i] = v`. Vectors that are structs use __stored of __msl_packed.h.
template <class Pointer, class T>
struct __whole {
  Pointer at;
  METAL_FUNC void operator=(const T& value) const {
#ifdef MSL_UNDEFINED
    alignas(T) char bytes[sizeof(T)];
    __copy_padded(bytes, &value, sizeof(T));
    __builtin_memcpy((void*)(ulong)at, bytes, sizeof(T));
#else
    __builtin_memcpy((void*)(ulong)at, &value, sizeof(T));
#endif
  }
};
template <class T, class Pointer>
METAL_FUNC T __copied_bytes(Pointer from) {
  alignas(T) char bytes[sizeof(T)];
  __builtin_memcpy(bytes, (const void*)(ulong)from, sizeof(T));
  return *(const T*)bytes;
}
#define __MSL_OBJECT(space)                                                      \
  template <class T>                                                             \
  METAL_FUNC T __copied(const space T* from) {                                   \
    return __copied_bytes<T>(from);                                              \
  }                                                                              \
  template <class T>                                                             \
  METAL_FUNC enable_if_t<__is_struct<T>, T> __read(const space T& object, int) { \
    return __copied_bytes<T>(&object);                                           \
  }
#define __MSL_STORED(space)                                                                \
  template <class T>                                                                       \
  METAL_FUNC enable_if_t<__is_struct<T>, __whole<space T*, T>> __target(space T& object) { \
    return {&object};                                                                      \
  }
__MSL_EACH_SPACE(__MSL_OBJECT)
__MSL_EACH_WRITABLE(__MSL_STORED)
#undef __MSL_STORED
#undef __MSL_OBJECT
template <class T>
METAL_FUNC T __read(T value, long) {
  return value;
}

// An argument of a function. A packed vector of three is passed as a vector.
template <class T>
METAL_FUNC auto __passed(T value) {
  return __unpack(value);
}

// The type of a program-scope constant. It is in constant memory unless it needs a constructor.
template <class T, bool constructed = __is_struct<T> && !__is_aggregate(T)>
struct __in_constant {
  typedef constant T type;
};
template <class T>
struct __in_constant<T, true> {
  typedef const T type;
};

}  // namespace metal
