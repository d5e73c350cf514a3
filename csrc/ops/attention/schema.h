// The schemas of attention's ops, and the conversion of the dispatcher's arguments to structs.
#pragma once

#include "csrc/ops/cache/schema.h"
#include "csrc/problem/attention.h"

#define FLASH_FIRST_SCHEMA FLASH_FIRST_OPTIONS(OPTION_SCHEMA)
#define FLASH_SCHEMA FLASH_OPTIONS(OPTION_SCHEMA)
#define PACKING_SCHEMA \
  ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"

// Arguments of the ops. Only varlen ops have PACKING_SCHEMA.
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
#define CACHE_PARAMETERS                                                              \
  OptionalTensor block_table, OptionalTensor cache_batch_idx, OptionalTensor k_scale, \
      OptionalTensor v_scale
#define CACHE_VALUES {block_table, cache_batch_idx, k_scale, v_scale}

namespace metal_attn {

// The types of Packing's fields.
#define PACKING_TYPES TensorArgument, TensorArgument, int64_t, int64_t

std::optional<Packing> packing_of(const auto&... packing) {
  return sizeof...(packing) == 0 ? std::nullopt : std::optional(Packing{packing...});
}

template <auto run, class... Packed>
struct FlashFwd {
  static auto call(TensorArgument q, TensorArgument k, TensorArgument v,
                   Packed... packed FLASH_OPTION_PARAMETERS, CACHE_PARAMETERS) {
    return run(
        FlashFwdArguments{q, k, v, packing_of(packed...), {FLASH_OPTION_VALUES}, CACHE_VALUES});
  }
};

template <auto run, class... Packed>
struct FlashBwd {
  static auto call(TensorArgument dout, OptionalTensor dlse, TensorArgument q, TensorArgument k,
                   TensorArgument v, TensorArgument out, TensorArgument lse, Packed... packed,
                   bool exact_delta FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdArguments{dout,
                                 dlse,
                                 out,
                                 lse,
                                 exact_delta,
                                 {q, k, v, packing_of(packed...), {FLASH_OPTION_VALUES}, {}}});
  }
};

template <auto run, class... Packed>
struct FlashBwdBias {
  static auto call(TensorArgument dout, TensorArgument q, TensorArgument k, TensorArgument v,
                   TensorArgument lse, TensorArgument delta, Packed... packed,
                   OptionalTensor normalisers FLASH_OPTION_PARAMETERS) {
    return run(FlashBwdBiasArguments{dout,
                                     lse,
                                     delta,
                                     normalisers,
                                     {q, k, v, packing_of(packed...), {FLASH_OPTION_VALUES}, {}}});
  }
};

template <auto run>
using FlashVarlenFwd = FlashFwd<run, PACKING_TYPES>;
template <auto run>
using FlashVarlenBwd = FlashBwd<run, PACKING_TYPES>;
template <auto run>
using FlashVarlenBwdBias = FlashBwdBias<run, PACKING_TYPES>;

}  // namespace metal_attn
