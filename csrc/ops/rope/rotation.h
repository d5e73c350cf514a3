// How rows are rotated from memory to memory (shaders/rotate_rows.h), for rope and append_kv.
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"

namespace metal_attn {

// Elements of the widest vector type of Metal.
inline constexpr int64_t kMaxVector = 4;

// Elements of the vectors that first elements and strides of `tensor` are all aligned to.
int64_t aligned_vector(const Tensor& tensor);

struct HeadShares {
  int heads;       // of a thread, which loads cos and sin once for them
  int32_t groups;  // of heads
};

// `threads`: of one head.
HeadShares share_heads(double threads, int32_t heads);

}  // namespace metal_attn
