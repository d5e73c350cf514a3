// The CPU tensors that the running op has allocated, and the bytes of them that kernels have
// written. The simulator's checks fault a read of other bytes.
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"

namespace metal_attn {

// Until the thread's op ends.
void remember_fresh(const Tensor& tensor);

// A byte for each byte of the storage, 0 where nothing has been written; null if it is not fresh.
uint8_t* initialised_bytes(const void* storage);

}  // namespace metal_attn
