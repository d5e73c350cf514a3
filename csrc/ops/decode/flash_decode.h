// metal_attn::flash_decode: attention of few queries over long caches, split over the keys.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

struct FlashDecodeArguments {
  FlashFwdArguments forward;  // dense
  int64_t num_splits;         // 0: chosen from the sizes and the GPU's cores
};

// As flash_fwd, without dropout and without rotation of k.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> flash_decode(
    const FlashDecodeArguments& arguments, Backend& backend);

std::string flash_decode_explain(const FlashDecodeArguments& arguments);

}  // namespace metal_attn
