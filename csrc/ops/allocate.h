// Tensors that ops return, allocated through the dispatcher.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace metal_attn {

// Dense strides for `sizes`, whose dimensions but the last lie in memory in the order of `like`'s.
// A broadcast dimension of `like` says nothing about order and goes outermost.
std::vector<int64_t> strides_like(const torch::stable::Tensor& like,
                                  const std::vector<int64_t>& sizes);

// Uninitialised, of `like`'s dtype and device. Through the dispatcher, so that torch's
// deterministic mode fills it as it fills its own tensors.
torch::stable::Tensor new_empty_strided(const torch::stable::Tensor& like,
                                        const std::vector<int64_t>& sizes,
                                        const std::vector<int64_t>& strides);

}  // namespace metal_attn
