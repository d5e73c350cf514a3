// The schemas of decoding's ops, and how the dispatcher's arguments become structs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "csrc/ops/attention/schema.h"
#include "csrc/ops/decode/decode_step.h"
#include "csrc/ops/decode/flash_decode.h"

#define FLASH_DECODE_ARGUMENTS FLASH_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ", SymInt num_splits=0)"

#define DECODE_STEP_OPTIONS                                                                      \
  APPEND_KV_ROTARY ", " FLASH_FIRST_OPTIONS                                                      \
                   ", SymInt attention_chunk=0, "                                                \
                   "Tensor? leftpad_k=None, Tensor? attn_mask=None, Tensor? attn_bias=None, "    \
                   "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? learnable_sink=None, " \
                   "Tensor? block_table=None, Tensor? cache_batch_idx=None, "

namespace metal_attn {

inline constexpr char kFlashDecode[] = "flash_decode" FLASH_DECODE_ARGUMENTS FLASH_FWD_RESULT;
inline constexpr char kFlashDecodeExplain[] =
    "flash_decode_explain" FLASH_DECODE_ARGUMENTS " -> int[]";

// `run` of the op's arguments, of which the forward's `make` takes its own.
template <auto run, typename Forward>
struct FlashDecodeOp;

template <auto run, auto make, typename... Options>
struct FlashDecodeOp<run, FlashFwdOp<make, Options...>> {
  using Tensor = torch::stable::Tensor;
  using Cached = CacheOptions::OptionalTensor;
  static auto call(const Tensor& q, const Tensor& k, const Tensor& v, Options... options,
                   Cached block_table, Cached cache_batch_idx, Cached k_scale, Cached v_scale,
                   int64_t num_splits) {
    return run(
        {{q, k, v, std::nullopt, {options...}, {block_table, cache_batch_idx, k_scale, v_scale}},
         num_splits});
  }
};

template <auto run>
using FlashDecode = FlashDecodeOp<run, FlashFwd<flash_fwd_explain>>;

inline constexpr char kDecodeStep[] =
    "decode_step(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor cache_seqlens, *, " DECODE_STEP_OPTIONS
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, SymInt num_splits=0) "
    "-> (Tensor out, Tensor softmax_lse)";
inline constexpr char kDecodeStepExplain[] =
    "decode_step_explain(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, "
    "Tensor cache_seqlens, *, " DECODE_STEP_OPTIONS
    "Tensor? k_scale=None, Tensor? v_scale=None, SymInt num_splits=0) -> int[]";

// decode_step's arguments, one by one as the dispatcher gives them, as DecodeStepArguments.
template <auto run>
auto decode_step_op(
    const torch::stable::Tensor& q, const torch::stable::Tensor& k, const torch::stable::Tensor& v,
    const torch::stable::Tensor& k_cache, const torch::stable::Tensor& v_cache,
    const torch::stable::Tensor& cache_seqlens, CacheOptions::OptionalTensor rotary_cos,
    CacheOptions::OptionalTensor rotary_sin, bool rotary_interleaved, bool rotate_q_by_token,
    bool rotary_from_leftpad, std::optional<double> softmax_scale, bool causal,
    int64_t window_size_left, int64_t window_size_right, int64_t attention_chunk,
    CacheOptions::OptionalTensor leftpad_k, CacheOptions::OptionalTensor attn_mask,
    CacheOptions::OptionalTensor attn_bias, double softcap,
    CacheOptions::OptionalTensor alibi_slopes, CacheOptions::OptionalTensor learnable_sink,
    CacheOptions::OptionalTensor block_table, CacheOptions::OptionalTensor cache_batch_idx,
    CacheOptions::OptionalTensor k_scale, CacheOptions::OptionalTensor v_scale,
    int64_t num_splits) {
  const CacheOptions cache{
      block_table, cache_batch_idx, k_scale, v_scale, {"k", "k_cache", "v_cache"}};
  FlashFwdOptions options{};
  options.softmax_scale = softmax_scale;
  options.causal = causal;
  options.window_size_left = window_size_left;
  options.window_size_right = window_size_right;
  options.attention_chunk = attention_chunk;
  options.attn_mask = attn_mask;
  options.attn_bias = attn_bias;
  options.softcap = softcap;
  options.alibi_slopes = alibi_slopes;
  options.learnable_sink = learnable_sink;
  AppendKvArguments append{k,
                           v,
                           k_cache,
                           v_cache,
                           cache_seqlens,
                           rotary_cos ? CacheOptions::OptionalTensor(q) : std::nullopt,
                           leftpad_k,
                           cache,
                           rotary_cos,
                           rotary_sin,
                           rotary_interleaved,
                           rotate_q_by_token,
                           rotary_from_leftpad};
  return run(DecodeStepArguments{
      append, {{q, k_cache, v_cache, std::nullopt, options, cache}, num_splits}});
}

}  // namespace metal_attn
