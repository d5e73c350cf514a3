// The schemas of flash_bwd_bias' and flash_bwd_slopes' ops, and how the dispatcher's arguments
// become FlashBwdBiasArguments.
#pragma once

#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/schema.h"

#define FLASH_BWD_BIAS_ARGUMENTS                                                   \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, " \
  "*, " FLASH_FWD_OPTIONS ")"
#define FLASH_VARLEN_BWD_BIAS_ARGUMENTS                                                  \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, "       \
  "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, " \
  "*, " FLASH_FWD_OPTIONS ")"

namespace metal_attn {

inline constexpr char kFlashBwdBias[] = "flash_bwd_bias" FLASH_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashVarlenBwdBias[] =
    "flash_varlen_bwd_bias" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashBwdBiasExplain[] =
    "flash_bwd_bias_explain" FLASH_BWD_BIAS_ARGUMENTS " -> str";
inline constexpr char kFlashVarlenBwdBiasExplain[] =
    "flash_varlen_bwd_bias_explain" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> str";
inline constexpr char kFlashBwdSlopes[] = "flash_bwd_slopes" FLASH_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashVarlenBwdSlopes[] =
    "flash_varlen_bwd_slopes" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashBwdSlopesExplain[] =
    "flash_bwd_slopes_explain" FLASH_BWD_BIAS_ARGUMENTS " -> str";
inline constexpr char kFlashVarlenBwdSlopesExplain[] =
    "flash_varlen_bwd_slopes_explain" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> str";

// `run` of the op's arguments, of which the forward's `make` takes its own.
template <auto run, typename Forward>
struct FlashBwdBiasOp;

template <auto run, auto make, typename... Options>
struct FlashBwdBiasOp<run, FlashFwdOp<make, Options...>> {
  using Tensor = torch::stable::Tensor;
  static auto dense(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& lse, const Tensor& delta, Options... options) {
    return run({dout, lse, delta, {q, k, v, std::nullopt, {options...}, {}}});
  }
  static auto varlen(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& lse, const Tensor& delta, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     Options... options) {
    return run({dout,
                lse,
                delta,
                {q,
                 k,
                 v,
                 Packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                 {options...},
                 {}}});
  }
};

template <auto run>
using FlashBwdBias = FlashBwdBiasOp<run, FlashFwd<flash_fwd_explain>>;

}  // namespace metal_attn
