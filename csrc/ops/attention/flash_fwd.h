// metal_attn::flash_fwd and flash_varlen_fwd: attention forward, dense and packed.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "csrc/ops/cache/check.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// In the order of the schema. What each means is in torch_metal_attn/reference.py, `attention`.
struct FlashFwdOptions {
  using OptionalTensor = std::optional<torch::stable::Tensor>;
  std::optional<double> softmax_scale;
  bool causal;
  int64_t window_size_left;
  int64_t window_size_right;
  int64_t attention_chunk;
  std::optional<int64_t> q_offset;
  OptionalTensor seqused_k;
  OptionalTensor leftpad_k;
  OptionalTensor attn_mask;
  OptionalTensor attn_bias;
  double softcap;
  OptionalTensor alibi_slopes;
  OptionalTensor learnable_sink;
  OptionalTensor q_rotary_cos;
  OptionalTensor q_rotary_sin;
  OptionalTensor k_rotary_cos;
  OptionalTensor k_rotary_sin;
  bool rotary_interleaved;
  double dropout_p;
  OptionalTensor rng_state;
};

// Sequences packed one after the other.
struct Packing {
  torch::stable::Tensor cu_seqlens_q;  // (B + 1) int32
  torch::stable::Tensor cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
};

// q: (B, Hq, Lq, D), k: (B, Hkv, Lk, D), v: (B, Hkv, Lk, Dv), or packed (Tq, Hq, D), (Tk, Hkv, D),
// (Tk, Hkv, Dv); alike in device and in dtype: float32, float16 or bfloat16; or k and v in half
// precision and q in float32. Hkv divides Hq, and the last strides are 1. Of a cache, k and v may
// differ: see CacheOptions.
struct FlashFwdArguments {
  torch::stable::Tensor q;
  torch::stable::Tensor k;
  torch::stable::Tensor v;
  std::optional<Packing> packing;
  FlashFwdOptions options;
  CacheOptions cache;
};

// What flash_fwd returns, uninitialised.
torch::stable::Tensor new_out(const FlashFwdArguments& arguments, int64_t head_dim_v);
torch::stable::Tensor new_lse(const FlashFwdArguments& arguments);

// Returns out, of q's shape but for its last size, like q in dtype and in order of dimensions, and
// softmax_lse, (B, Hq, Lq) or (Hq, Tq), float32, contiguous. Throws std::invalid_argument for what
// the schema's documentation does not allow.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> flash_fwd(
    const FlashFwdArguments& arguments, Backend& backend);

// The same checks and choice as JSON, without running or allocating anything.
std::string flash_fwd_explain(const FlashFwdArguments& arguments);

}  // namespace metal_attn
