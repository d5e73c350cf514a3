// Whole structs in device, threadgroup and constant memory: what the rewriter makes of reading and
// storing them, as C++ has no constructors and no assignment for objects in an address space.
#pragma once
#include <__msl_packed.h>

namespace metal {

template <class T>
constexpr bool __is_struct = __is_class(T) || __is_union(T);

#ifdef MSL_UNDEFINED
// A struct's padding was never written, so what is stored is not followed back to its fields.
MSL_INTERNAL inline void __copy_padded(void* to, const void* from, ulong bytes) {
  __builtin_memcpy(to, from, bytes);
}
#endif
// The left side of `p[i] = v`. Vectors that are structs have their own, in __msl_packed.h.
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
#define __MSL_OBJECT(space)                                                              \
  template <class T>                                                                     \
  METAL_FUNC T __copied(const space T* from) {                                           \
    return __copied_bytes<T>(from);                                                      \
  }                                                                                      \
  template <class T>                                                                     \
  METAL_FUNC typename __if<__is_struct<T>, T>::type __read(const space T& object, int) { \
    return __copied_bytes<T>(&object);                                                   \
  }
#define __MSL_STORED(space)                                                                        \
  template <class T>                                                                               \
  METAL_FUNC typename __if<__is_struct<T>, __whole<space T*, T>>::type __target(space T& object) { \
    return {&object};                                                                              \
  }
__MSL_EACH_SPACE(__MSL_OBJECT)
__MSL_EACH_WRITABLE(__MSL_STORED)
#undef __MSL_STORED
#undef __MSL_OBJECT
// Whatever else is read.
template <class T>
METAL_FUNC T __read(T value, long) {
  return value;
}

// An argument: a packed vector of three as a vector, which functions take.
template <class T>
METAL_FUNC auto __passed(T value) {
  return __unpack(value);
}

// The type of a constant of the program: in constant memory, unless it needs a constructor.
template <class T, bool constructed = __is_struct<T> && !__is_aggregate(T)>
struct __in_constant {
  typedef constant T type;
};
template <class T>
struct __in_constant<T, true> {
  typedef const T type;
};

}  // namespace metal
