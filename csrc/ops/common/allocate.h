// Allocates the results and buffers of ops, on meta while launches are recorded.
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"
#include "csrc/runtime/fixed_vector.h"

namespace metal_attn {

// Sizes or strides.
using Dims = FixedVector<int64_t, 8>;

Dims sizes_of(const Tensor& tensor);

// (B, H, L) for rows (B, H, L, D), or (H, T) for packed rows (T, H, D).
Dims lse_sizes(const Tensor& rows);

// Dense strides for `sizes` with the last dimension innermost, and the rest in the order of `like`.
// Broadcast dimensions of `like` are outermost.
Dims strides_like(const Tensor& like, const Dims& sizes);

// A view with two dimensions swapped, which autograd does not track.
Tensor swapped(const Tensor& tensor, int64_t one, int64_t other);

// Uninitialised, on the device of `like`. torch's deterministic mode fills it. Throws
// std::runtime_error with torch's reason if there is no memory.
Tensor new_empty_strided(const Tensor& like, const Dims& sizes, const Dims& strides,
                         ScalarType dtype);
// Contiguous.
Tensor new_empty(const Tensor& like, const Dims& sizes, ScalarType dtype);
Tensor new_zeros(const Tensor& like, const Dims& sizes, ScalarType dtype);
// Dense, with the dtype, the sizes and the order of dimensions of `like`.
Tensor new_empty_like(const Tensor& like);

}  // namespace metal_attn
