// Calls of torch's C functions, which throw what they failed with.
#pragma once

#include <torch/csrc/stable/tensor.h>

// Headers of torch 2.10 have it under the name that it had before.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
