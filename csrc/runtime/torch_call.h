// Calls of torch's C functions, which throw what they failed with.
#pragma once

#include <torch/csrc/stable/tensor.h>

// A name of our own: torch's, which some headers bring along, is not in those of torch 2.10
// to 2.12.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define TORCH_CALL(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define TORCH_CALL(call) TORCH_ERROR_CODE_CHECK(call)
#endif
