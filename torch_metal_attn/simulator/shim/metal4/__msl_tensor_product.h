// What the last lane of a tensor operation does with the elements that all lanes have left.
#pragma once
#include <__msl_cooperative.h>
#include <__msl_product.h>

namespace metal {

// One matrix of a product: where its elements are in what each lane leaves.
struct __tensor_part {
  uint operand, is_transposed, rows, columns;  // as stored
  uint begin;                                  // the first slot's place
};
// A product of m x k by k x n, the same for all lanes.
struct __tensor_product {
  uint m, n, k;
  __tensor_part left, right, destination;
  bool accumulates;
  bool cuts_left, cuts_right;  // relaxed precision, and float operands
};
#define MSL_MOST_ELEMENTS 1024  // of a matrix

MSL_INTERNAL inline const float* __left_by(const __msl_slot& slot) {
  return *(const float* const*)&slot;
}

// The part as it is in memory, NaN where lanes are missing.
MSL_INTERNAL inline void __gather(float* to, const __tensor_part& part, const __msl_exchange& box,
                                  unsigned mask) {
  const __msl_lane_map* map =
      __msl_table->lane_map(part.operand, part.is_transposed, part.rows, part.columns, 1);
  for (uint i = 0; i < part.rows * part.columns; ++i) to[i] = __builtin_nanf("");
  for (uint lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const float* from = __left_by(box.lanes[lane]) + part.begin;
    const uint* element = map->element + lane * map->capacity;
    for (uint slot = 0; slot < map->capacity; ++slot) {
      uint at = element[slot], row = at >> 16, column = at & 0xFFFF;
      if (at == MSL_NO_ELEMENT) continue;
      to[part.is_transposed ? column * part.rows + row : row * part.columns + column] = from[slot];
    }
  }
}
// A float of 11 significant bits: one of the 13 bits that go decides, or none.
MSL_INTERNAL inline float __cut(float x, bool rounds) {
  uint bits = __builtin_bit_cast(uint, x);
  if ((bits & 0x7F800000u) == 0x7F800000u) return x;  // infinities and NaN
  if (rounds) bits += 0xFFFu + (bits >> 13 & 1);
  return __builtin_bit_cast(float, bits & ~0x1FFFu);
}
// The destination is A B, or A B + itself, in float32: k ascending, each step one fused
// multiply-add.
MSL_INTERNAL inline void __combine_tensors(void* deposits, unsigned mask) {
  __msl_exchange& box = *(__msl_exchange*)deposits;
  uint first = __builtin_ctz(mask);
  const __tensor_product& p = *((const __tensor_product* const*)&box.lanes[first])[1];
  alignas(32) __attribute__((uninitialized)) float a[MSL_MOST_ELEMENTS];
  alignas(32) __attribute__((uninitialized)) float b[MSL_MOST_ELEMENTS];
  alignas(32) __attribute__((uninitialized)) float d[MSL_MOST_ELEMENTS];
  __gather(a, p.left, box, mask);
  __gather(b, p.right, box, mask);
  if (p.accumulates)
    __gather(d, p.destination, box, mask);
  else
    __builtin_memset(d, 0, sizeof d);
  bool rounds = __msl_this_worker()->rounds;
  for (uint i = 0; p.cuts_left && i < p.m * p.k; ++i) a[i] = __cut(a[i], rounds);
  for (uint i = 0; p.cuts_right && i < p.k * p.n; ++i) b[i] = __cut(b[i], rounds);
  for (uint i = 0; i < p.m; ++i) {
    for (uint j = 0; j < p.n; j += 8) {
      __msl_row sum, row;
      __builtin_memcpy(&sum, d + i * p.n + j, sizeof sum);
      for (uint k = 0; k < p.k; ++k) {
        __builtin_memcpy(&row, b + k * p.n + j, sizeof row);
        sum = __builtin_elementwise_fma((__msl_row)a[i * p.k + k], row, sum);
      }
      __builtin_memcpy(d + i * p.n + j, &sum, sizeof sum);
    }
  }
  const __tensor_part& part = p.destination;
  const __msl_lane_map* map =
      __msl_table->lane_map(part.operand, part.is_transposed, part.rows, part.columns, 1);
  for (uint lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    float* to = (float*)__left_by(box.lanes[lane]) + part.begin;
    for (uint slot = 0; slot < map->capacity; ++slot) {
      uint at = map->element[lane * map->capacity + slot];
      if (at != MSL_NO_ELEMENT) to[slot] = d[(at >> 16) * p.n + (at & 0xFFFF)];
    }
  }
  *(ulong*)&box.result = (ulong)p.m * p.n * p.k;
}

}  // namespace metal

extern "C" {
// A lane's elements go to where the others find them and come back, without checks of accesses.
MSL_ENTRY void __msl_leave(float* to, float value) { *to = value; }
MSL_ENTRY float __msl_take(const float* from) { return *from; }
MSL_ENTRY void __msl_tensor_product(float* elements, const metal::__tensor_product* product) {
  __msl_table->exchange(&metal::__combine_tensors, (ulong)elements, (ulong)product, MSL_TENSOR,
                        __builtin_return_address(0));
}
}
