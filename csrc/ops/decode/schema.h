// The schemas of flash_decode, and how the dispatcher's arguments become FlashDecodeArguments.
#pragma once

#include "csrc/ops/attention/schema.h"
#include "csrc/ops/decode/flash_decode.h"

#define FLASH_DECODE_ARGUMENTS FLASH_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ", SymInt num_splits=0)"

namespace metal_attn {

inline constexpr char kFlashDecode[] = "flash_decode" FLASH_DECODE_ARGUMENTS FLASH_FWD_RESULT;
inline constexpr char kFlashDecodeExplain[] =
    "flash_decode_explain" FLASH_DECODE_ARGUMENTS " -> str";

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

}  // namespace metal_attn
