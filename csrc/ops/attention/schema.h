// The schemas of attention's ops, and how the dispatcher's arguments become structs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "csrc/ops/cache/schema.h"
#include "csrc/problem/attention.h"
#include "csrc/problem/options.h"

// What a list of options.h makes of each entry: its part of a schema, of a function's parameters,
// and of a struct's values.
#define OPTION_SCHEMA(TYPE, NAME, DEFAULT, STEP) ", " SCHEMA_##TYPE " " #NAME "=" #DEFAULT
#define OPTION_PARAMETER(TYPE, NAME, DEFAULT, STEP) , metal_attn::TYPE NAME
#define OPTION_VALUE(TYPE, NAME, DEFAULT, STEP) NAME,

#define FLASH_FIRST_SCHEMA FLASH_FIRST_OPTIONS(OPTION_SCHEMA)
#define FLASH_SCHEMA FLASH_OPTIONS(OPTION_SCHEMA)
#define PACKING_SCHEMA \
  ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"

// Arguments of the ops, of which the varlen ones have PACKING_SCHEMA.
#define FLASH_CACHED_ARGUMENTS(PACKING) \
  "(Tensor q, Tensor k, Tensor v" PACKING ", *" FLASH_SCHEMA ", " FLASH_CACHE_OPTIONS
#define FLASH_FWD_RESULT "(Tensor out, Tensor softmax_lse)"
#define FLASH_BWD_ARGUMENTS(PACKING)                                       \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, " \
  "Tensor softmax_lse" PACKING ", *, bool exact_delta=False" FLASH_SCHEMA
#define FLASH_BWD_RESULT "(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor normalisers)"
#define FLASH_BWD_BIAS_ARGUMENTS(PACKING)                                                \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta" PACKING \
  ", *, Tensor? normalisers=None" FLASH_SCHEMA

#define FLASH_OPTION_PARAMETERS FLASH_OPTIONS(OPTION_PARAMETER)
#define FLASH_OPTION_VALUES FLASH_OPTIONS(OPTION_VALUE)
#define FLASH_FIRST_PARAMETERS FLASH_FIRST_OPTIONS(OPTION_PARAMETER)
#define FLASH_FIRST_VALUES FLASH_FIRST_OPTIONS(OPTION_VALUE)
#define PACKING_PARAMETERS                                                              \
  const torch::stable::Tensor &cu_seqlens_q, const torch::stable::Tensor &cu_seqlens_k, \
      int64_t max_seqlen_q, int64_t max_seqlen_k
#define PACKING_VALUES \
  Packing { cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k }
#define CACHE_PARAMETERS                                                              \
  OptionalTensor block_table, OptionalTensor cache_batch_idx, OptionalTensor k_scale, \
      OptionalTensor v_scale
#define CACHE_VALUES {block_table, cache_batch_idx, k_scale, v_scale}

namespace metal_attn {

// `run` of an op's arguments, which the dispatcher gives one by one.
template <auto run>
struct FlashFwd {
  using Tensor = torch::stable::Tensor;
  static auto dense(const Tensor& q, const Tensor& k, const Tensor& v FLASH_OPTION_PARAMETERS,
                    CACHE_PARAMETERS) {
    return run(FlashFwdArguments{q, k, v, std::nullopt, {FLASH_OPTION_VALUES}, CACHE_VALUES});
  }
  static auto varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                     PACKING_PARAMETERS FLASH_OPTION_PARAMETERS, CACHE_PARAMETERS) {
    return run(FlashFwdArguments{q, k, v, PACKING_VALUES, {FLASH_OPTION_VALUES}, CACHE_VALUES});
  }
};

template <auto run>
struct FlashBwd {
  using Tensor = torch::stable::Tensor;
  static auto dense(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                    const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                    bool exact_delta FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdArguments{
        dout, dlse, out, lse, exact_delta, {q, k, v, std::nullopt, {FLASH_OPTION_VALUES}, {}}});
  }
  static auto varlen(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                     const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                     PACKING_PARAMETERS, bool exact_delta FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdArguments{
        dout, dlse, out, lse, exact_delta, {q, k, v, PACKING_VALUES, {FLASH_OPTION_VALUES}, {}}});
  }
};

template <auto run>
struct FlashBwdBias {
  using Tensor = torch::stable::Tensor;
  static auto dense(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& lse, const Tensor& delta,
                    const OptionalTensor& normalisers FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdBiasArguments{
        dout, lse, delta, normalisers, {q, k, v, std::nullopt, {FLASH_OPTION_VALUES}, {}}});
  }
  static auto varlen(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& lse, const Tensor& delta, PACKING_PARAMETERS,
                     const OptionalTensor& normalisers FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdBiasArguments{
        dout, lse, delta, normalisers, {q, k, v, PACKING_VALUES, {FLASH_OPTION_VALUES}, {}}});
  }
};

}  // namespace metal_attn
