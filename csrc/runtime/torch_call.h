// Calls of torch's C functions, which throw what they failed with.
#pragma once

#include <torch/csrc/stable/tensor.h>

// Not by torch's name, which older headers lack: a source without this header then fails with each.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define TORCH_CALL(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define TORCH_CALL(call) TORCH_ERROR_CODE_CHECK(call)
#endif
