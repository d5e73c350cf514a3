// metal_attn::flash_fwd: dense attention forward.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// q: (B, Hq, Lq, D), k: (B, Hkv, Lk, D), v: (B, Hkv, Lk, Dv), alike in device and in dtype:
// float32, float16 or bfloat16. D and Dv are multiples of 8 in 8..256, Hkv divides Hq, and the last
// strides are 1. softmax_scale defaults to D ** -0.5. With a causal_offset, query i sees key j iff
// j <= i + causal_offset.
struct FlashFwdArguments {
  torch::stable::Tensor q;
  torch::stable::Tensor k;
  torch::stable::Tensor v;
  std::optional<double> softmax_scale;
  std::optional<int64_t> causal_offset;
};

// Returns out, (B, Hq, Lq, Dv) like q in dtype and in order of dimensions, and softmax_lse,
// (B, Hq, Lq) float32 contiguous. Throws std::invalid_argument for arguments other than the above.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> flash_fwd(
    const FlashFwdArguments& arguments, Backend& backend);

// The same checks and choice as JSON, without running or allocating anything.
std::string flash_fwd_explain(const FlashFwdArguments& arguments);

}  // namespace metal_attn
