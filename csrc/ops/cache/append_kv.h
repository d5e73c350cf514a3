// metal_attn::append_kv: new keys and values into a cache, quantised if it is, and turned.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "csrc/ops/cache/check.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// k: (B, Hkv, L, D) and v: (B, Hkv, L, Dv) in float32, float16 or bfloat16, the last stride 1.
// Row i of sequence b becomes row cache_seqlens[b] + i of what is sequence b's in
//   k_cache (Bc, Hkv, capacity, D) and v_cache alike: batch cache_batch_idx[b], or b;
//   k_cache (pages, Hkv, page, D): row r is row r % page of page block_table[b, r / page].
// Caches have k's dtype, or half precision where that is float32, or one of
// torch_metal_attn/quantisation.py's formats with its scales.
// rotary_cos and rotary_sin (rows, R / 2) rotate row i of k by their row cache_seqlens[b] + i, less
// leftpad_k[b] if rotary_from_leftpad. Token i of q (B, Hq, Lq, D) is rotated in place by the same
// row, or unless rotate_q_by_token by that of i = 0. Indices are int32, (B) or (B, blocks).
struct AppendKvArguments {
  using OptionalTensor = CacheOptions::OptionalTensor;
  torch::stable::Tensor k;
  torch::stable::Tensor v;
  torch::stable::Tensor k_cache;
  torch::stable::Tensor v_cache;
  OptionalTensor cache_seqlens;
  OptionalTensor q;
  OptionalTensor leftpad_k;
  CacheOptions cache;
  OptionalTensor rotary_cos;
  OptionalTensor rotary_sin;
  bool rotary_interleaved;
  bool rotate_q_by_token;
  bool rotary_from_leftpad;
};

// Throws std::invalid_argument for other arguments, before anything is written. On mps the host
// does not see values of indices: rows that do not fit, and those of batches or pages that do not
// exist, are not written, and rows of tables that do not exist turn into NaN.
void append_kv(const AppendKvArguments& arguments, Backend& backend);

// The same checks and choice as JSON, without running anything.
std::string append_kv_explain(const AppendKvArguments& arguments);

}  // namespace metal_attn
