// metal_simdgroup, metal_quadgroup and metal_compute: barriers, shuffles, reductions and votes.
#pragma once
#include <__msl_engine.h>
#include <__msl_operations.h>

namespace metal {

METAL_FUNC void threadgroup_barrier(mem_flags flags) { __msl_threadgroup_barrier((uint)flags); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { __msl_simdgroup_barrier((uint)flags); }

// Conversions of a value of up to 16 bytes to two words or a slot, and back.
template <class T>
METAL_FUNC __msl_words __to_words(T x) {
  __msl_words words = {0, 0};
  __builtin_memcpy(&words, &x, sizeof(T));
  return words;
}
template <class T, class Stored>
METAL_FUNC T __from(const Stored& stored) {
  T x;
  __builtin_memcpy(&x, &stored, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC void __set_slot(__msl_slot& slot, T x) {
  __builtin_memcpy(&slot, &x, sizeof(T));
}

// Calls `exchange(value, words)` for a scalar or a short vector, or for each element of a longer
// vector.
template <class T, class F>
METAL_FUNC T __in_words(T x, F exchange) {
  if constexpr (sizeof(T) > 16) {
    for (int i = 0; i < __length<T>; ++i) x[i] = __in_words((__element<T>)x[i], exchange);
    return x;
  } else {
    return __from<T>(exchange(x, __to_words(x)));
  }
}

template <class T>
METAL_FUNC T __shuffle(T x, uint direction, uint argument) {
  static_assert(
      __vector_of<T>::is_vector || __is_scalar(T) || __is_floating_point(T) || __is_same(T, bfloat),
      "SIMD functions take scalars and vectors");
  return __in_words(x, [=](auto, __msl_words words) {
    return __msl_shuffle(words.low, words.high, direction, argument);
  });
}

// Broadcasts one lane's value within each run of `width` lanes.
template <class T>
METAL_FUNC T __broadcast(T x, uint lane, uint width) {
#ifdef MSL_CHECKED
  return __in_words(x, [=](auto, __msl_words words) {
    return __msl_broadcast(words.low, words.high, lane, width);
  });
#else
  return __shuffle(x, MSL_TO_LANE, (__msl_lane() & ~(width - 1)) + lane % width);
#endif
}

#define __MSL_SHUFFLE(name, ...)         \
  template <class T>                     \
  METAL_FUNC T name(T x, ushort which) { \
    return __VA_ARGS__;                  \
  }
__MSL_SHUFFLE(simd_shuffle, __shuffle(x, MSL_TO_LANE, which))
__MSL_SHUFFLE(simd_broadcast, __broadcast(x, which, MSL_SIMD_WIDTH))
__MSL_SHUFFLE(simd_shuffle_xor, __shuffle(x, MSL_XOR, which))
__MSL_SHUFFLE(simd_shuffle_up, __shuffle(x, MSL_UP, which))
__MSL_SHUFFLE(simd_shuffle_down, __shuffle(x, MSL_DOWN, which))
__MSL_SHUFFLE(simd_shuffle_rotate_up, __shuffle(x, MSL_ROTATE_UP, which))
__MSL_SHUFFLE(simd_shuffle_rotate_down, __shuffle(x, MSL_ROTATE_DOWN, which))
// Lanes that would read past an end of their run of `modulo` lanes read `fill` from the run's other
// end instead.
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

// Reduces the active lanes as a tree: lane i with lane i + 16, then with i + 8, ... i + 1.
template <class T, template <class> class Op>
MSL_INTERNAL void __combine_reduction(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  T values[32];
  uint present = mask;
  for (int i = 0; i < 32; ++i) values[i] = __from<T>(box.lanes[i]);
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
  return __in_words(x, [](auto value, __msl_words words) {
    return __msl_reduce(&__combine_reduction<decltype(value), Op>, words.low, words.high,
                        MSL_REDUCTION);
  });
}

template <class T, template <class> class Op, bool inclusive>
MSL_INTERNAL void __combine_scan(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  T total = Op<T>::identity();
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    T before = total;
    total = Op<T>::apply(total, __from<T>(box.lanes[i]));
    __set_slot(box.lanes[i], inclusive ? total : before);
  }
}
template <class T, template <class> class Op, bool inclusive>
METAL_FUNC T __scan(T x) {
  return __in_words(x, [](auto value, __msl_words words) {
    return __msl_scan(&__combine_scan<decltype(value), Op, inclusive>, words.low, words.high);
  });
}

// The low word of the result is the ballot, and the high word is the mask of active lanes.
MSL_INTERNAL inline void __combine_vote(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  ulong ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= (ulong)(mask >> i & 1 && __from<ulong>(box.lanes[i])) << i;
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
  return __from<T>(__msl_reduce(&__combine_first, words.low, words.high, MSL_ACTIVE));
}

// A quad is four neighbouring lanes. Quad functions synchronise the whole SIMD group.
METAL_FUNC void __check_quad_lane(uint lane) {
#ifdef MSL_CHECKED
  __msl_check_lane(lane, 4);
#endif
}
// The lane at `place` of this lane's quad.
template <class T>
METAL_FUNC T __quad_lane(T x, uint place) {
  return __shuffle(x, MSL_TO_LANE, (__msl_lane() & ~3u) + (place & 3));
}
template <class T>
METAL_FUNC T quad_shuffle(T x, ushort lane) {
  __check_quad_lane(lane);
  return __quad_lane(x, lane);
}
template <class T>
METAL_FUNC T quad_shuffle_xor(T x, ushort mask) {
  __check_quad_lane(mask);
  return __shuffle(x, MSL_XOR, mask & 3);
}
METAL_FUNC uint __place_in_quad() { return __msl_lane() & 3; }
__MSL_SHUFFLE(quad_broadcast, __broadcast(x, which, 4))
__MSL_SHUFFLE(quad_shuffle_up,
              __quad_lane(x, __place_in_quad() - (__place_in_quad() >= which ? which : 0)))
__MSL_SHUFFLE(quad_shuffle_down,
              __quad_lane(x, __place_in_quad() + (__place_in_quad() + which < 4 ? which : 0)))
__MSL_SHUFFLE(quad_shuffle_rotate_up, __quad_lane(x, __place_in_quad() - which))
__MSL_SHUFFLE(quad_shuffle_rotate_down, __quad_lane(x, __place_in_quad() + which))
#undef __MSL_SHUFFLE

template <class T, template <class> class Op>
MSL_INTERNAL void __combine_quads(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  for (int quad = 0; quad < 32; quad += 4) {
    T total = __from<T>(box.lanes[quad]);
    bool any = mask >> quad & 1;
    for (int i = quad + 1; i < quad + 4; ++i) {
      if (!(mask >> i & 1)) continue;
      T value = __from<T>(box.lanes[i]);
      total = any ? Op<T>::apply(total, value) : value;
      any = true;
    }
    for (int i = quad; i < quad + 4; ++i) __set_slot(box.lanes[i], total);
  }
}
template <class T, template <class> class Op>
METAL_FUNC T __quad_reduce(T x) {
  return __in_words(x, [](auto value, __msl_words words) {
    return __msl_scan(&__combine_quads<decltype(value), Op>, words.low, words.high);
  });
}

#define __MSL_REDUCTION(name, ...) \
  template <class T>               \
  METAL_FUNC T name(T x) {         \
    return __VA_ARGS__(x);         \
  }
#define __MSL_REDUCTIONS(name, Op)              \
  __MSL_REDUCTION(simd_##name, __reduce<T, Op>) \
  __MSL_REDUCTION(quad_##name, __quad_reduce<T, Op>)
__MSL_REDUCTIONS(sum, __add)
__MSL_REDUCTIONS(product, __multiply)
__MSL_REDUCTIONS(max, __largest)
__MSL_REDUCTIONS(min, __smallest)
__MSL_REDUCTIONS(and, __and)
__MSL_REDUCTIONS(or, __or)
__MSL_REDUCTIONS(xor, __xor)
__MSL_REDUCTION(simd_prefix_inclusive_sum, __scan<T, __add, true>)
__MSL_REDUCTION(simd_prefix_exclusive_sum, __scan<T, __add, false>)
__MSL_REDUCTION(simd_prefix_inclusive_product, __scan<T, __multiply, true>)
__MSL_REDUCTION(simd_prefix_exclusive_product, __scan<T, __multiply, false>)
#undef __MSL_REDUCTIONS
#undef __MSL_REDUCTION

METAL_FUNC bool quad_all(bool x) {
  __msl_words vote = __vote(x);
  return ((vote.low ^ vote.high) >> (__msl_lane() & ~3u) & 15) == 0;
}
METAL_FUNC bool quad_any(bool x) { return (__vote(x).low >> (__msl_lane() & ~3u) & 15) != 0; }

}  // namespace metal
