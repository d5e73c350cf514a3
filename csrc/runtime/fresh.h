// The CPU tensors that the running op has allocated, and which of their bytes kernels have written.
// The simulator's checks report a read of other bytes.
#pragma once

#include <cstdint>

#include "csrc/problem/tensor.h"

namespace metal_attn {

// Remembers the tensor until the thread's op ends.
void remember_fresh(const Tensor& tensor);

// A byte for each byte of the storage, 0 if it is uninitialised. Null for other storages.
uint8_t* initialised_bytes(const void* storage);

}  // namespace metal_attn
