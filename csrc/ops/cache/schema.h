// The schemas of append_kv and copy_pages, and how the dispatcher's arguments become
// AppendKvArguments.
#pragma once

#include "csrc/ops/cache/append_kv.h"

// In the order of CacheOptions.
#define FLASH_CACHE_OPTIONS                                  \
  "Tensor? block_table=None, Tensor? cache_batch_idx=None, " \
  "Tensor? k_scale=None, Tensor? v_scale=None"

#define APPEND_KV_OPTIONS \
  "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, "
#define APPEND_KV_ROTARY                               \
  "Tensor? rotary_cos=None, Tensor? rotary_sin=None, " \
  "bool rotary_interleaved=False, bool rotate_q_by_token=True, bool rotary_from_leftpad=True"

namespace metal_attn {

inline constexpr char kAppendKv[] =
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? cache_seqlens=None, *, Tensor(c!)? q=None, " APPEND_KV_OPTIONS
    "Tensor(d!)? k_scale=None, Tensor(e!)? v_scale=None, " APPEND_KV_ROTARY ") -> ()";
inline constexpr char kAppendKvExplain[] =
    "append_kv_explain(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, "
    "Tensor? cache_seqlens=None, *, Tensor? q=None, " APPEND_KV_OPTIONS
    "Tensor? k_scale=None, Tensor? v_scale=None, " APPEND_KV_ROTARY ") -> int[]";

inline constexpr char kCopyPages[] = "copy_pages(Tensor(a!) cache, Tensor src, Tensor dst) -> ()";
inline constexpr char kCopyPagesExplain[] =
    "copy_pages_explain(Tensor cache, Tensor src, Tensor dst) -> int[]";

// append_kv's arguments, one by one as the dispatcher gives them, as AppendKvArguments.
template <auto run>
auto append_kv_op(
    const torch::stable::Tensor& k, const torch::stable::Tensor& v,
    const torch::stable::Tensor& k_cache, const torch::stable::Tensor& v_cache,
    AppendKvArguments::OptionalTensor cache_seqlens, AppendKvArguments::OptionalTensor q,
    AppendKvArguments::OptionalTensor block_table,
    AppendKvArguments::OptionalTensor cache_batch_idx, AppendKvArguments::OptionalTensor leftpad_k,
    AppendKvArguments::OptionalTensor k_scale, AppendKvArguments::OptionalTensor v_scale,
    AppendKvArguments::OptionalTensor rotary_cos, AppendKvArguments::OptionalTensor rotary_sin,
    bool rotary_interleaved, bool rotate_q_by_token, bool rotary_from_leftpad) {
  return run({k,
              v,
              k_cache,
              v_cache,
              cache_seqlens,
              q,
              leftpad_k,
              {block_table, cache_batch_idx, k_scale, v_scale, {"k", "k_cache", "v_cache"}},
              rotary_cos,
              rotary_sin,
              rotary_interleaved,
              rotate_q_by_token,
              rotary_from_leftpad});
}

}  // namespace metal_attn
