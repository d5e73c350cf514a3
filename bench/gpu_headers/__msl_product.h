// The product of 8x8 matrices on a GPU; replaces the simulator's header of this name.
#pragma once
#include <__msl_simd.h>

namespace metal {

#if defined(__SPIRV__)

// One instruction of Apple's GPU; a lane has a pair of elements of each operand. M1 and M2 multiply
// halves and floats; the driver converts bfloats to floats.
METAL_FUNC vec<float, 2> __agx_floats(float x, float y) {
  vec<float, 2> pair;
  pair.x = x;
  pair.y = y;
  return pair;
}
template <class A, class B>
METAL_FUNC void __gpu_product(float2& d, vec<A, 2> a, vec<B, 2> b) {
  if constexpr (__is_same(A, half) && __is_same(B, half)) {
    d = agx_product_hh(a, b, d);
  } else if constexpr (__is_same(A, bfloat) && __is_same(B, bfloat)) {
    d = agx_product_bb(a, b, d);
  } else if constexpr (__is_same(B, half)) {
    d = agx_product_fh(__agx_floats((float)a.x, (float)a.y), b, d);
  } else if constexpr (__is_same(B, bfloat)) {
    d = agx_product_fb(__agx_floats((float)a.x, (float)a.y), b, d);
  } else {
    d = agx_product_ff(__agx_floats((float)a.x, (float)a.y), __agx_floats((float)b.x, (float)b.y),
                       d);
  }
}

#else

METAL_FUNC uint __gpu_transpose(uint word) {
  uint moved;
  __asm__("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(word));
  return moved;
}
METAL_FUNC uint __gpu_bytes(uint a, uint b, uint which) {
  uint d;
  __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
  return d;
}
#define __GPU_MMA(kind, d0, d1, registers_a, registers_b, ...)                                   \
  __asm__("mma.sync.aligned.m16n8k8.row.col." kind " {%0,%1,%2,%3}," registers_a "," registers_b \
          ";"                                                                                    \
          : "=f"(d0), "=f"(d1), "=f"(unused0), "=f"(unused1)                                     \
          : __VA_ARGS__)

// A product of floats is three products of TF32, which has only 11 bits.
METAL_FUNC void __gpu_float_product(float2& d, float2 a, float2 b) {
  const uint x = as_type<uint>((float)b.x), y = as_type<uint>((float)b.y), zero = 0;
  const uint high = __gpu_transpose(__gpu_bytes(x, y, 0x7632));
  const uint low = __gpu_transpose(__gpu_bytes(x, y, 0x5410));
  const uint b0 = __gpu_bytes(low, high, 0x5410), b1 = __gpu_bytes(low, high, 0x7632);
  const uint a0 = as_type<uint>((float)a.x), a1 = as_type<uint>((float)a.y);
  float unused0, unused1;
#define __GPU_TF32(A0, A1, B0, B1)                                                                \
  {                                                                                               \
    float d0, d1;                                                                                 \
    __GPU_MMA("f32.tf32.tf32.f32", d0, d1, "{%4,%5,%6,%7}", "{%8,%9},{%10,%11,%12,%13}", "r"(A0), \
              "r"(zero), "r"(A1), "r"(zero), "r"(B0), "r"(B1), "f"((float)d.x), "f"((float)d.y),  \
              "f"(0.0f), "f"(0.0f));                                                              \
    d.x = d0;                                                                                     \
    d.y = d1;                                                                                     \
  }
  const uint mask = 0xffffe000u;
#define __GPU_REST(word) as_type<uint>(as_type<float>(word) - as_type<float>((uint)((word) & mask)))
  __GPU_TF32(__GPU_REST(a0), __GPU_REST(a1), b0, b1)
  __GPU_TF32(a0, a1, __GPU_REST(b0), __GPU_REST(b1))
#undef __GPU_REST
  __GPU_TF32(a0, a1, b0, b1)
#undef __GPU_TF32
}

template <class T>
METAL_FUNC float2 __gpu_floats(vec<T, 2> x) {
  float2 wide;
  if constexpr (sizeof(T) == 4) {
    wide = x;
  } else if constexpr (__is_same(T, half)) {
    float low, high;
    __asm__ volatile(
        "{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(low), "=f"(high)
        : "r"(__builtin_bit_cast(uint, x)));
    wide.x = low;
    wide.y = high;
  } else {
    uint low, high;
    __asm__ volatile("shl.b32 %0, %2, 16; and.b32 %1, %2, 0xffff0000;"
                     : "=r"(low), "=r"(high)
                     : "r"(__builtin_bit_cast(uint, x)));
    wide.x = as_type<float>(low);
    wide.y = as_type<float>(high);
  }
  return wide;
}
template <class A, class B>
METAL_FUNC void __gpu_product(float2& d, vec<A, 2> a, vec<B, 2> b) {
  if constexpr (__is_same(A, B) && sizeof(A) == 2) {
    const uint left = __builtin_bit_cast(uint, a), zero = 0;
    const uint right = __gpu_transpose(__builtin_bit_cast(uint, b));
    float d0, d1, unused0, unused1;
#define __GPU_HALVES(kind)                                                                    \
  __GPU_MMA("f32." kind "." kind ".f32", d0, d1, "{%4,%5}", "{%6},{%7,%8,%9,%10}", "r"(left), \
            "r"(zero), "r"(right), "f"((float)d.x), "f"((float)d.y), "f"(0.0f), "f"(0.0f))
    if constexpr (__is_same(A, half))
      __GPU_HALVES("f16");
    else
      __GPU_HALVES("bf16");
#undef __GPU_HALVES
    d.x = d0;
    d.y = d1;
  } else {
    __gpu_float_product(d, __gpu_floats<A>(a), __gpu_floats<B>(b));
  }
}
#undef __GPU_MMA

#endif

template <class D, class A, class B, class C>
METAL_FUNC vec<D, 2> __product(vec<A, 2> a, vec<B, 2> b, vec<C, 2> c) {
  float2 sum;
  sum.x = (float)c.x;
  sum.y = (float)c.y;
  __gpu_product<A, B>(sum, a, b);
  vec<D, 2> d;
  d.x = (D)sum.x;
  d.y = (D)sum.y;
  return d;
}

}  // namespace metal
