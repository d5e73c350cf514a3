// metal_math with a GPU's instructions; the simulator's header calls the C library.
#pragma once
#include <__msl_engine.h>

#if defined(__SPIRV__)
#define __GPU_MATH(name, agx, nvvm) \
  METAL_FUNC float __gpu_##name(float x) { return agx(x); }
#else
#define __GPU_MATH(name, agx, nvvm) \
  METAL_FUNC float __gpu_##name(float x) { return nvvm(x); }
#endif
__GPU_MATH(exp2, agx_exp2, __nvvm_ex2_approx_ftz_f)
__GPU_MATH(log2, agx_log2, __nvvm_lg2_approx_f)
__GPU_MATH(sin, agx_sin, __nvvm_sin_approx_f)
__GPU_MATH(cos, agx_cos, __nvvm_cos_approx_f)
__GPU_MATH(sqrt, agx_sqrt, __builtin_sqrtf)
#undef __GPU_MATH
METAL_FUNC float __gpu_exp(float x) { return __gpu_exp2(x * 1.44269504f); }
METAL_FUNC float __gpu_log(float x) { return __gpu_log2(x) * 0.693147181f; }
METAL_FUNC float __gpu_log10(float x) { return __gpu_log2(x) * 0.301029996f; }
METAL_FUNC float __gpu_pow(float x, float y) { return __gpu_exp2(__gpu_log2(x) * y); }
METAL_FUNC float __gpu_tanh(float x) {
  const float y = __gpu_exp2(__builtin_fabsf(x) * -2.885390082f);
  return __builtin_copysignf((1.0f - y) / (1.0f + y), x);
}

// The same functions for vectors, applied to each element.
#define __GPU_EACH(name)                                                                  \
  template <class T, class... More>                                                       \
  METAL_FUNC T __gpu_each_##name(T x, More... more) {                                     \
    if constexpr (metal::__is_vector<T>) {                                                \
      for (int i = 0; i < metal::__length<T>; ++i) x[i] = __gpu_##name(x[i], more[i]...); \
      return x;                                                                           \
    } else {                                                                              \
      return __gpu_##name(x, more...);                                                    \
    }                                                                                     \
  }
__GPU_EACH(exp)
__GPU_EACH(exp2)
__GPU_EACH(log)
__GPU_EACH(log2)
__GPU_EACH(log10)
__GPU_EACH(sin)
__GPU_EACH(cos)
__GPU_EACH(pow)
__GPU_EACH(sqrt)
#undef __GPU_EACH

#define __builtin_elementwise_exp __gpu_each_exp
#define __builtin_elementwise_exp2 __gpu_each_exp2
#define __builtin_elementwise_log __gpu_each_log
#define __builtin_elementwise_log2 __gpu_each_log2
#define __builtin_elementwise_log10 __gpu_each_log10
#define __builtin_elementwise_sin __gpu_each_sin
#define __builtin_elementwise_cos __gpu_each_cos
#define __builtin_elementwise_pow __gpu_each_pow
#define __builtin_elementwise_sqrt __gpu_each_sqrt
#define __builtin_tanhf __gpu_tanh
#include_next <__msl_math.h>
