// metal_math, with instructions of a GPU where the simulator's header calls the C library.
#pragma once
#include <__msl_engine.h>

#if defined(__SPIRV__)
METAL_FUNC float __gpu_exp2(float x) { return agx_exp2(x); }
METAL_FUNC float __gpu_log2(float x) { return agx_log2(x); }
METAL_FUNC float __gpu_sin(float x) { return agx_sin(x); }
METAL_FUNC float __gpu_cos(float x) { return agx_cos(x); }
METAL_FUNC float __gpu_sqrt(float x) { return agx_sqrt(x); }
#else
METAL_FUNC float __gpu_exp2(float x) { return __nvvm_ex2_approx_ftz_f(x); }
METAL_FUNC float __gpu_log2(float x) { return __nvvm_lg2_approx_f(x); }
METAL_FUNC float __gpu_sin(float x) { return __nvvm_sin_approx_f(x); }
METAL_FUNC float __gpu_cos(float x) { return __nvvm_cos_approx_f(x); }
METAL_FUNC float __gpu_sqrt(float x) { return __builtin_sqrtf(x); }
#endif
METAL_FUNC float __gpu_exp(float x) { return __gpu_exp2(x * 1.44269504f); }
METAL_FUNC float __gpu_log(float x) { return __gpu_log2(x) * 0.693147181f; }
METAL_FUNC float __gpu_log10(float x) { return __gpu_log2(x) * 0.301029996f; }
METAL_FUNC float __gpu_pow(float x, float y) { return __gpu_exp2(__gpu_log2(x) * y); }
METAL_FUNC float __gpu_tanh(float x) {
  const float y = __gpu_exp2(__builtin_fabsf(x) * -2.885390082f);
  return __builtin_copysignf((1.0f - y) / (1.0f + y), x);
}

// Element by element.
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
