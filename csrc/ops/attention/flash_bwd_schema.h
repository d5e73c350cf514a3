// The schemas of flash_bwd's ops, and how the dispatcher's arguments become FlashBwdArguments.
#pragma once

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/schema.h"

#define FLASH_BWD_ARGUMENTS                                                \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, " \
  "Tensor softmax_lse, *, bool exact_delta=False, " FLASH_FWD_OPTIONS ")"
#define FLASH_VARLEN_BWD_ARGUMENTS                                                      \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "              \
  "Tensor softmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, " \
  "SymInt max_seqlen_k, *, bool exact_delta=False, " FLASH_FWD_OPTIONS ")"
#define FLASH_BWD_RESULT " -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)"

namespace metal_attn {

inline constexpr char kFlashBwd[] = "flash_bwd" FLASH_BWD_ARGUMENTS FLASH_BWD_RESULT;
inline constexpr char kFlashVarlenBwd[] =
    "flash_varlen_bwd" FLASH_VARLEN_BWD_ARGUMENTS FLASH_BWD_RESULT;
inline constexpr char kFlashBwdExplain[] = "flash_bwd_explain" FLASH_BWD_ARGUMENTS " -> str";
inline constexpr char kFlashVarlenBwdExplain[] =
    "flash_varlen_bwd_explain" FLASH_VARLEN_BWD_ARGUMENTS " -> str";
inline constexpr char kFlashBwdPlan[] = "flash_bwd_plan" FLASH_FWD_ARGUMENTS ") -> str";
inline constexpr char kFlashVarlenBwdPlan[] =
    "flash_varlen_bwd_plan" FLASH_VARLEN_FWD_ARGUMENTS ") -> str";

// `run` of the op's arguments, of which the forward's `make` takes its own.
template <auto run, typename Forward>
struct FlashBwdOp;

template <auto run, auto make, typename... Options>
struct FlashBwdOp<run, FlashFwdOp<make, Options...>> {
  using Tensor = torch::stable::Tensor;
  using OptionalTensor = FlashFwdOptions::OptionalTensor;
  static auto dense(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                    const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                    bool exact_delta, Options... options) {
    return run({dout, dlse, out, lse, exact_delta, {q, k, v, std::nullopt, {options...}, {}}});
  }
  static auto varlen(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                     const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                     const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                     int64_t max_seqlen_k, bool exact_delta, Options... options) {
    return run({dout,
                dlse,
                out,
                lse,
                exact_delta,
                {q,
                 k,
                 v,
                 Packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                 {options...},
                 {}}});
  }
};

template <auto run>
using FlashBwd = FlashBwdOp<run, FlashFwd<flash_fwd_explain>>;

}  // namespace metal_attn
