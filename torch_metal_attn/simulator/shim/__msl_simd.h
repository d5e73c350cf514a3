// metal_simdgroup, metal_quadgroup and metal_compute: barriers, shuffles, reductions and votes.
#pragma once
#include <__msl_engine.h>
#include <__msl_operations.h>

namespace metal {

METAL_FUNC void threadgroup_barrier(mem_flags flags) { __msl_threadgroup_barrier((uint)flags); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { __msl_simdgroup_barrier((uint)flags); }

// A value of up to 16 bytes as two words, and back.
template <class T>
METAL_FUNC __msl_words __to_words(T x) {
  __msl_words words = {0, 0};
  __builtin_memcpy(&words, &x, sizeof(T));
  return words;
}
template <class T>
METAL_FUNC T __from_words(__msl_words words) {
  T x;
  __builtin_memcpy(&x, &words, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC T __slot_value(const __msl_slot& slot) {
  T x;
  __builtin_memcpy(&x, &slot, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC void __set_slot(__msl_slot& slot, T x) {
  __builtin_memcpy(&slot, &x, sizeof(T));
}

template <class T>
METAL_FUNC T __shuffle(T x, uint direction, uint argument) {
  static_assert(
      __vector_of<T>::is_vector || __is_scalar(T) || __is_floating_point(T) || __is_same(T, bfloat),
      "SIMD functions take scalars and vectors");
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __shuffle((__element<T>)x[i], direction, argument);
    return x;
  } else {
    __msl_words words = __to_words(x);
    return __from_words<T>(__msl_shuffle(words.low, words.high, direction, argument));
  }
}

// The value of one lane for all of each run of `width` lanes.
template <class T>
METAL_FUNC T __broadcast(T x, uint lane, uint width) {
#ifdef MSL_CHECKED
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __broadcast((__element<T>)x[i], lane, width);
    return x;
  } else {
    __msl_words words = __to_words(x);
    return __from_words<T>(__msl_broadcast(words.low, words.high, lane, width));
  }
#else
  return __shuffle(x, MSL_TO_LANE, (__msl_lane() & ~(width - 1)) + lane % width);
#endif
}

template <class T>
METAL_FUNC T simd_shuffle(T x, ushort lane) {
  return __shuffle(x, MSL_TO_LANE, lane);
}
template <class T>
METAL_FUNC T simd_broadcast(T x, ushort lane) {
  return __broadcast(x, lane, MSL_SIMD_WIDTH);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shuffle(x, MSL_XOR, mask);
}
template <class T>
METAL_FUNC T simd_shuffle_up(T x, ushort delta) {
  return __shuffle(x, MSL_UP, delta);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T x, ushort delta) {
  return __shuffle(x, MSL_DOWN, delta);
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_up(T x, ushort delta) {
  return __shuffle(x, MSL_ROTATE_UP, delta);
}
template <class T>
METAL_FUNC T simd_shuffle_rotate_down(T x, ushort delta) {
  return __shuffle(x, MSL_ROTATE_DOWN, delta);
}
// Lanes that would read past an end of their run of `modulo` lanes read `fill` instead, from its
// other end.
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo = 32) {
  uint lane = __msl_lane(), at = lane % modulo, base = lane - at;
  T moved = __shuffle(x, MSL_TO_LANE, base + (at - delta) % modulo);
  T filled = __shuffle(fill, MSL_TO_LANE, base + (at + modulo - delta) % modulo);
  return at >= delta ? moved : filled;
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo = 32) {
  uint lane = __msl_lane(), at = lane % modulo, base = lane - at;
  T moved = __shuffle(x, MSL_TO_LANE, base + (at + delta) % modulo);
  T filled = __shuffle(fill, MSL_TO_LANE, base + (at + delta) % modulo);
  return at + delta < modulo ? moved : filled;
}

// A tree over the lanes that take part, in lane order: lane i with lane i + 16, then + 8, ... + 1.
template <class T, template <class> class Op>
MSL_INTERNAL void __combine_reduction(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  T values[32];
  uint present = mask;
  for (int i = 0; i < 32; ++i) values[i] = __slot_value<T>(box.lanes[i]);
  for (int step = 16; step; step >>= 1) {
    uint merged = 0;
    for (int i = 0; i < step; ++i) {
      bool left = present >> i & 1, right = present >> (i + step) & 1;
      values[i] = left && right ? Op<T>::apply(values[i], values[i + step])
                  : left        ? values[i]
                                : values[i + step];
      merged |= (uint)(left || right) << i;
    }
    present = merged;
  }
  __set_slot(box.result, values[0]);
}
template <class T, template <class> class Op>
METAL_FUNC T __reduce(T x) {
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __reduce<__element<T>, Op>(x[i]);
    return x;
  } else {
    __msl_words words = __to_words(x);
    return __from_words<T>(
        __msl_reduce(&__combine_reduction<T, Op>, words.low, words.high, MSL_REDUCTION));
  }
}
template <class T>
METAL_FUNC T simd_sum(T x) {
  return __reduce<T, __add>(x);
}
template <class T>
METAL_FUNC T simd_product(T x) {
  return __reduce<T, __multiply>(x);
}
template <class T>
METAL_FUNC T simd_max(T x) {
  return __reduce<T, __largest>(x);
}
template <class T>
METAL_FUNC T simd_min(T x) {
  return __reduce<T, __smallest>(x);
}
template <class T>
METAL_FUNC T simd_and(T x) {
  return __reduce<T, __and>(x);
}
template <class T>
METAL_FUNC T simd_or(T x) {
  return __reduce<T, __or>(x);
}
template <class T>
METAL_FUNC T simd_xor(T x) {
  return __reduce<T, __xor>(x);
}

template <class T, template <class> class Op, bool inclusive>
MSL_INTERNAL void __combine_scan(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  T total = Op<T>::identity();
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    T before = total;
    total = Op<T>::apply(total, __slot_value<T>(box.lanes[i]));
    __set_slot(box.lanes[i], inclusive ? total : before);
  }
}
template <class T, template <class> class Op, bool inclusive>
METAL_FUNC T __scan(T x) {
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __scan<__element<T>, Op, inclusive>(x[i]);
    return x;
  } else {
    __msl_words words = __to_words(x);
    return __from_words<T>(__msl_scan(&__combine_scan<T, Op, inclusive>, words.low, words.high));
  }
}
template <class T>
METAL_FUNC T simd_prefix_inclusive_sum(T x) {
  return __scan<T, __add, true>(x);
}
template <class T>
METAL_FUNC T simd_prefix_exclusive_sum(T x) {
  return __scan<T, __add, false>(x);
}
template <class T>
METAL_FUNC T simd_prefix_inclusive_product(T x) {
  return __scan<T, __multiply, true>(x);
}
template <class T>
METAL_FUNC T simd_prefix_exclusive_product(T x) {
  return __scan<T, __multiply, false>(x);
}

// Leaves the ballot in the low word and the lanes that take part in the high one.
MSL_INTERNAL inline void __combine_vote(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  ulong ballot = 0;
  for (int i = 0; i < 32; ++i)
    ballot |= (ulong)(mask >> i & 1 && __slot_value<ulong>(box.lanes[i])) << i;
  __msl_words words = {ballot, mask};
  __builtin_memcpy(&box.result, &words, sizeof(words));
}
METAL_FUNC __msl_words __vote(bool x) { return __msl_reduce(&__combine_vote, x, 0, MSL_VOTE); }

METAL_FUNC simd_vote simd_ballot(bool x) { return simd_vote(__vote(x).low); }
METAL_FUNC bool simd_all(bool x) {
  __msl_words vote = __vote(x);
  return vote.low == vote.high;
}
METAL_FUNC bool simd_any(bool x) { return __vote(x).low != 0; }
METAL_FUNC simd_vote simd_active_threads_mask() {
  return simd_vote(__msl_reduce(&__combine_vote, 1, 0, MSL_ACTIVE).high);
}
METAL_FUNC bool simd_is_first() {
  return (uint)__builtin_ctzl(__msl_reduce(&__combine_vote, 1, 0, MSL_ACTIVE).high) == __msl_lane();
}
METAL_FUNC bool simd_is_helper_thread() { return false; }

MSL_INTERNAL inline void __combine_first(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  box.result = box.lanes[__builtin_ctz(mask)];
}
template <class T>
METAL_FUNC T simd_broadcast_first(T x) {
  __msl_words words = __to_words(x);
  return __from_words<T>(__msl_reduce(&__combine_first, words.low, words.high, MSL_ACTIVE));
}

// A quad is four neighbouring lanes; its functions meet with the whole SIMD group.
METAL_FUNC void __check_quad_lane(uint lane) {
#ifdef MSL_CHECKED
  __msl_check_lane(lane, 4);
#endif
}
template <class T>
METAL_FUNC T quad_shuffle(T x, ushort lane) {
  __check_quad_lane(lane);
  return __shuffle(x, MSL_TO_LANE, (__msl_lane() & ~3u) + (lane & 3));
}
template <class T>
METAL_FUNC T quad_broadcast(T x, ushort lane) {
  return __broadcast(x, lane, 4);
}
template <class T>
METAL_FUNC T quad_shuffle_xor(T x, ushort mask) {
  __check_quad_lane(mask);
  return __shuffle(x, MSL_XOR, mask & 3);
}
template <class T>
METAL_FUNC T quad_shuffle_up(T x, ushort delta) {
  uint lane = __msl_lane();
  return __shuffle(x, MSL_TO_LANE, (lane & 3) >= delta ? lane - delta : lane);
}
template <class T>
METAL_FUNC T quad_shuffle_down(T x, ushort delta) {
  uint lane = __msl_lane();
  return __shuffle(x, MSL_TO_LANE, (lane & 3) + delta < 4 ? lane + delta : lane);
}
template <class T>
METAL_FUNC T quad_shuffle_rotate_up(T x, ushort delta) {
  uint lane = __msl_lane();
  return __shuffle(x, MSL_TO_LANE, (lane & ~3u) + ((lane - delta) & 3));
}
template <class T>
METAL_FUNC T quad_shuffle_rotate_down(T x, ushort delta) {
  uint lane = __msl_lane();
  return __shuffle(x, MSL_TO_LANE, (lane & ~3u) + ((lane + delta) & 3));
}

template <class T, template <class> class Op>
MSL_INTERNAL void __combine_quads(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  for (int quad = 0; quad < 32; quad += 4) {
    T total = __slot_value<T>(box.lanes[quad]);
    bool any = mask >> quad & 1;
    for (int i = quad + 1; i < quad + 4; ++i) {
      if (!(mask >> i & 1)) continue;
      T value = __slot_value<T>(box.lanes[i]);
      total = any ? Op<T>::apply(total, value) : value;
      any = true;
    }
    for (int i = quad; i < quad + 4; ++i) __set_slot(box.lanes[i], total);
  }
}
template <class T, template <class> class Op>
METAL_FUNC T __quad_reduce(T x) {
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __quad_reduce<__element<T>, Op>(x[i]);
    return x;
  } else {
    __msl_words words = __to_words(x);
    return __from_words<T>(__msl_scan(&__combine_quads<T, Op>, words.low, words.high));
  }
}
template <class T>
METAL_FUNC T quad_sum(T x) {
  return __quad_reduce<T, __add>(x);
}
template <class T>
METAL_FUNC T quad_product(T x) {
  return __quad_reduce<T, __multiply>(x);
}
template <class T>
METAL_FUNC T quad_max(T x) {
  return __quad_reduce<T, __largest>(x);
}
template <class T>
METAL_FUNC T quad_min(T x) {
  return __quad_reduce<T, __smallest>(x);
}
template <class T>
METAL_FUNC T quad_and(T x) {
  return __quad_reduce<T, __and>(x);
}
template <class T>
METAL_FUNC T quad_or(T x) {
  return __quad_reduce<T, __or>(x);
}
template <class T>
METAL_FUNC T quad_xor(T x) {
  return __quad_reduce<T, __xor>(x);
}
METAL_FUNC bool quad_all(bool x) {
  __msl_words vote = __vote(x);
  return ((vote.low ^ vote.high) >> (__msl_lane() & ~3u) & 15) == 0;
}
METAL_FUNC bool quad_any(bool x) { return (__vote(x).low >> (__msl_lane() & ~3u) & 15) != 0; }

}  // namespace metal
