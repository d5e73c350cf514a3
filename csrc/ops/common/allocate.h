// Tensors that ops return or work in: on meta while launches are recorded (recorder.h).
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"
#include "csrc/runtime/fixed_vector.h"

namespace metal_attn {

// Sizes or strides of any tensor that an op makes.
using Dims = FixedVector<int64_t, 8>;

Dims sizes_of(const Tensor& tensor);

// Dense strides for `sizes`, whose dimensions but the last lie in memory in the order of `like`'s.
// A broadcast dimension of `like` says nothing about order and goes outermost.
Dims strides_like(const Tensor& like, const Dims& sizes);

// The tensor with two dimensions swapped: a view of its memory that autograd knows nothing of.
Tensor swapped(const Tensor& tensor, int64_t one, int64_t other);

// Uninitialised, on `like`'s device; torch's deterministic mode fills it as it fills its own
// tensors. Throws std::runtime_error with torch's reason if there is no memory.
Tensor new_empty_strided(const Tensor& like, const Dims& sizes, const Dims& strides,
                         ScalarType dtype);
// Contiguous.
Tensor new_empty(const Tensor& like, const Dims& sizes, ScalarType dtype);
Tensor new_zeros(const Tensor& like, const Dims& sizes, ScalarType dtype);
// As `like` in dtype and sizes, dense, and with its order of dimensions.
Tensor new_empty_like(const Tensor& like);

}  // namespace metal_attn
