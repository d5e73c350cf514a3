// The schemas of append_kv and copy_pages, and the conversion of the dispatcher's arguments.
#pragma once

#include "csrc/ops/common/arguments.h"

// In the order of CacheOptions.
#define FLASH_CACHE_OPTIONS                                  \
  "Tensor? block_table=None, Tensor? cache_batch_idx=None, " \
  "Tensor? k_scale=None, Tensor? v_scale=None"

#define ROTARY_SCHEMA ROTARY_OPTIONS(OPTION_SCHEMA)
#define ROTARY_PARAMETERS ROTARY_OPTIONS(OPTION_PARAMETER)
#define ROTARY_VALUES {ROTARY_OPTIONS(OPTION_VALUE)}
#define APPEND_KV_ARGUMENTS                                                          \
  "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "                    \
  "Tensor? cache_seqlens=None, *, Tensor(c!)? q=None, "                              \
  "Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, " \
  "Tensor(d!)? k_scale=None, Tensor(e!)? v_scale=None" ROTARY_SCHEMA ", SymInt hadamard=0"
#define COPY_PAGES_ARGUMENTS "(Tensor(a!) cache, Tensor src, Tensor dst"

namespace metal_attn {

template <auto run>
struct AppendKv {
  static auto call(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                   OptionalTensor cache_seqlens, OptionalTensor q, OptionalTensor block_table,
                   OptionalTensor cache_batch_idx, OptionalTensor leftpad_k, OptionalTensor k_scale,
                   OptionalTensor v_scale ROTARY_PARAMETERS, int64_t hadamard) {
    return run(AppendKvArguments{ROTARY_VALUES,
                                 k,
                                 v,
                                 k_cache,
                                 v_cache,
                                 cache_seqlens,
                                 q,
                                 leftpad_k,
                                 {block_table, cache_batch_idx, k_scale, v_scale, kAppendNames},
                                 hadamard});
  }
};

template <auto run>
using CopyPages = Unchanged<run, TensorArgument, TensorArgument, TensorArgument>;

}  // namespace metal_attn
