// What copy_pages refuses.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace metal_attn {

void check_copy_pages(const torch::stable::Tensor& cache, const torch::stable::Tensor& src,
                      const torch::stable::Tensor& dst);

}  // namespace metal_attn
