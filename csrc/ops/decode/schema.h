// The schemas of decoding's ops, and the conversion of the dispatcher's arguments to structs.
#pragma once

#include "csrc/ops/attention/schema.h"
#include "csrc/problem/decode.h"

#define FLASH_DECODE_ARGUMENTS                    \
  FLASH_CACHED_ARGUMENTS()                        \
  ", SymInt num_splits=0, Tensor? indices=None, " \
  "SymInt kv_block_size=1, SymInt q_block_size=1" DECODE_OPTIONS(OPTION_SCHEMA)

// Expands only the options that decode_step has.
#define STEP_STEP(TEXT) TEXT
#define STEP_NO_STEP(TEXT)
#define STEP_SCHEMA(TYPE, NAME, DEFAULT, STEP) STEP_##STEP(OPTION_SCHEMA(TYPE, NAME, DEFAULT, STEP))
#define STEP_PARAMETER(TYPE, NAME, DEFAULT, STEP) \
  STEP_##STEP(OPTION_PARAMETER(TYPE, NAME, DEFAULT, STEP))
#define STEP_SET(TYPE, NAME, DEFAULT, STEP) STEP_##STEP(options.NAME = NAME;)

#define DECODE_STEP_ARGUMENTS \
  "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, " \
  "Tensor cache_seqlens, *" ROTARY_SCHEMA FLASH_OPTIONS(STEP_SCHEMA)          \
  ", Tensor? block_table=None, Tensor? cache_batch_idx=None, "              \
  "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, SymInt num_splits=0" \
  DECODE_OPTIONS(OPTION_SCHEMA) ", Tensor? cu_seqlens_k_new=None"

#define DECODE_PARAMETERS DECODE_OPTIONS(OPTION_PARAMETER)
#define DECODE_VALUES {DECODE_OPTIONS(OPTION_VALUE)}

namespace metal_attn {

template <auto run>
struct FlashDecode {
  static auto call(const Tensor& q, const Tensor& k, const Tensor& v FLASH_OPTION_PARAMETERS,
                   CACHE_PARAMETERS, int64_t num_splits, OptionalTensor indices,
                   int64_t kv_block_size, int64_t q_block_size DECODE_PARAMETERS) {
    const DecodeOptions decode DECODE_VALUES;
    return run(
        FlashDecodeArguments{{q, k, v, decode.packing(), {FLASH_OPTION_VALUES}, CACHE_VALUES},
                             num_splits,
                             {indices, kv_block_size, q_block_size},
                             decode});
  }
};

template <auto run>
struct DecodeStep {
  static auto call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                   const Tensor& v_cache,
                   const Tensor& cache_seqlens ROTARY_PARAMETERS FLASH_OPTIONS(STEP_PARAMETER),
                   CACHE_PARAMETERS, int64_t num_splits DECODE_PARAMETERS,
                   OptionalTensor cu_seqlens_k_new) {
    FlashFwdOptions options;
    FLASH_OPTIONS(STEP_SET)
    return step(q, k, v, k_cache, v_cache, cache_seqlens, ROTARY_VALUES, options, CACHE_VALUES,
                num_splits, DECODE_VALUES, cu_seqlens_k_new);
  }

  // leftpad_k of `options` becomes an option of the append.
  static auto step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                   const Tensor& v_cache, const Tensor& cache_seqlens, const RotaryOptions& rotary,
                   FlashFwdOptions options, CacheOptions cache, int64_t num_splits,
                   const DecodeOptions& decode = {},
                   const OptionalTensor& cu_seqlens_k_new = std::nullopt) {
    cache.names = kAppendNames;
    AppendKvArguments append{rotary,
                             k,
                             v,
                             k_cache,
                             v_cache,
                             cache_seqlens,
                             rotary.rotary_cos ? OptionalTensor(q) : std::nullopt,
                             options.leftpad_k,
                             cache,
                             decode.hadamard};
    if (decode.cu_seqlens_q) {
      append.packed =
          PackedRows{*decode.cu_seqlens_q, cu_seqlens_k_new.value_or(*decode.cu_seqlens_q),
                     cu_seqlens_k_new ? "cu_seqlens_k_new" : "cu_seqlens_q"};
    }
    options.leftpad_k.reset();
    return run(DecodeStepArguments{
        append,
        {{q, k_cache, v_cache, decode.packing(), options, cache}, num_splits, {}, decode},
        cu_seqlens_k_new.has_value()});
  }
};

}  // namespace metal_attn
