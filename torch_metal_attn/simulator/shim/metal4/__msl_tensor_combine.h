// Computes a tensor operation. The last thread to arrive does this with all threads' elements.
#pragma once
#include <__msl_product.h>
#include <__msl_tensor_engine.h>

namespace metal {

// The same for all threads. Each thread deposits its slots of the three operands, concatenated.
struct __tensor_product : __msl_tensor_operation {
  uint m, n, k;
  __tensor_part left, right, destination;
  bool accumulates;
  bool cuts_left, cuts_right;  // float operands in relaxed precision

  // The same product, added to the destination.
  constexpr __tensor_product added() const {
    __tensor_product other = *this;
    other.accumulates = true;
    return other;
  }
};

MSL_INTERNAL inline uint __slots(const __tensor_part& part) {
  uint threads = 32 * part.simdgroups;
  return (part.rows * part.columns + threads - 1) / threads;
}
// Calls visit(index in the logical matrix, the thread's copy) for each deposited element.
// begin: the part's first slot among the slots that a thread deposits.
template <class Visit>
METAL_FUNC void __for_each(const __tensor_part& part, uint begin, const __msl_slot* threads,
                           unsigned mask, Visit visit) {
  const __msl_lane_map* map = part.is_cooperative ? __msl_map(&part) : nullptr;
  uint count = 32 * part.simdgroups, capacity = map ? map->capacity : __slots(part);
  for (uint thread_ = 0; thread_ < count; ++thread_) {
    if (count == 32 && !(mask >> thread_ & 1)) continue;
    float* slots = *(float* const*)&threads[thread_] + begin;
    for (uint slot = 0; slot < capacity; ++slot) {
      uint row, column;
      if (map) {
        uint at = map->elements[thread_ * capacity + slot];
        if (at == MSL_NO_ELEMENT) continue;
        row = at >> 16;
        column = at & 0xFFFF;
      } else {
        row = (slot * count + thread_) / part.columns;
        column = (slot * count + thread_) % part.columns;
        if (row >= part.rows) continue;
      }
      visit(part.is_transposed ? column * part.rows + row : row * part.columns + column,
            slots[slot]);
    }
  }
}
// The logical matrix, with NaN where threads are missing.
MSL_INTERNAL inline void __gather(float* to, const __tensor_part& part, uint begin,
                                  const __msl_slot* threads, unsigned mask) {
  for (uint i = 0; i < part.rows * part.columns; ++i) to[i] = __builtin_nanf("");
  __for_each(part, begin, threads, mask, [to](uint at, float& element) { to[at] = element; });
}
// Reduces a float32 to 11 significant bits. The other 13 bits are rounded to even or truncated.
MSL_INTERNAL inline float __cut(float x) {
  uint bits = __builtin_bit_cast(uint, x);
  if ((bits & 0x7F800000u) == 0x7F800000u) return x;  // infinities and NaN
  if (__msl_this_worker()->rounds) bits += 0xFFFu + (bits >> 13 & 1);
  return __builtin_bit_cast(float, bits & ~0x1FFFu);
}
// A B or A B + C in float32 with k ascending. Each step is one fused multiply-add.
MSL_INTERNAL inline void __combine_product(void* deposits, unsigned mask) {
  const __msl_slot* threads = (const __msl_slot*)deposits;
  const void* about = ((const void* const*)&threads[__builtin_ctz(mask)])[1];
  const __tensor_product& p = *(const __tensor_product*)about;
  float* a = __msl_this_worker()->scratch;
  float* b = a + MSL_MOST_LEFT;
  float* c = b + MSL_MOST_RIGHT;
  uint begin_right = __slots(p.left), begin_destination = begin_right + __slots(p.right);
  __gather(a, p.left, 0, threads, mask);
  __gather(b, p.right, begin_right, threads, mask);
  if (p.accumulates)
    __gather(c, p.destination, begin_destination, threads, mask);
  else
    __builtin_memset(c, 0, sizeof(float) * p.m * p.n);
  for (uint i = 0; p.cuts_left && i < p.m * p.k; ++i) a[i] = __cut(a[i]);
  for (uint i = 0; p.cuts_right && i < p.k * p.n; ++i) b[i] = __cut(b[i]);
  for (uint i = 0; i < p.m; ++i) {
    for (uint j = 0; j < p.n; j += 8) {
      __msl_row sum, row;
      __builtin_memcpy(&sum, c + i * p.n + j, sizeof sum);
      for (uint k = 0; k < p.k; ++k) {
        __builtin_memcpy(&row, b + k * p.n + j, sizeof row);
        sum = __builtin_elementwise_fma((__msl_row)a[i * p.k + k], row, sum);
      }
      __builtin_memcpy(c + i * p.n + j, &sum, sizeof sum);
    }
  }
  const float* result = c;
  __for_each(p.destination, begin_destination, threads, mask,
             [result](uint at, float& element) { element = result[at]; });
}

// Each thread deposits the operation, the identity, and its slots of source and destination.
struct __tensor_reduction : __msl_tensor_operation {
  __tensor_part source, destination;
};
enum __reduction : uint { MSL_SUM, MSL_MAX, MSL_MIN };

// Reduces each row or column in order, beginning with the identity.
MSL_INTERNAL inline void __combine_tensor_reduction(void* deposits, unsigned mask) {
  const __msl_slot* threads = (const __msl_slot*)deposits;
  uint first = __builtin_ctz(mask);
  const float* deposited = *(const float* const*)&threads[first];
  const __tensor_reduction& p = *((const __tensor_reduction* const*)&threads[first])[1];
  float* elements = __msl_this_worker()->scratch;
  float* results = elements + MSL_MOST_DESTINATION;
  __gather(elements, p.source, 2, threads, mask);
  bool of_rows = p.destination.operand == MSL_ROWS;
  uint rows = p.source.rows, columns = p.source.columns;
  for (uint i = 0; i < (of_rows ? rows : columns); ++i) {
    float total = deposited[1];
    for (uint j = 0; j < (of_rows ? columns : rows); ++j) {
      float x = of_rows ? elements[i * columns + j] : elements[j * columns + i];
      total = deposited[0] == MSL_SUM   ? total + x
              : deposited[0] == MSL_MAX ? __builtin_fmaxf(total, x)
                                        : __builtin_fminf(total, x);
    }
    results[i] = total;
  }
  const float* result = results;
  __for_each(p.destination, 2 + __slots(p.source), threads, mask,
             [result](uint at, float& to) { to = result[at]; });
}

}  // namespace metal
