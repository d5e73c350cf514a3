// The division of rotations into threads (shaders/rotate_rows.h), for rope and append_kv.
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"

namespace metal_attn {

// The elements of Metal's widest vector type.
inline constexpr int64_t kMaxVector = 4;

// The largest power of two, in elements, to which the first element and all strides are aligned.
int64_t aligned_vector(const Tensor& tensor);

struct HeadShares {
  int heads;       // heads of a thread, which loads cos and sin once
  int32_t groups;  // groups of heads
};

// threads: the number of threads that one head needs.
HeadShares share_heads(double threads, int32_t heads);

}  // namespace metal_attn
