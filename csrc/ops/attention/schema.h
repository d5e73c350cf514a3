// The schemas of attention's ops, and how the dispatcher's arguments become structs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/cache/schema.h"

// In the order of FlashFwdOptions. The first are those that most calls have.
#define FLASH_FIRST_OPTIONS                                                    \
  "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, " \
  "SymInt window_size_right=-1"
#define FLASH_FWD_OPTIONS                                                                 \
  FLASH_FIRST_OPTIONS                                                                     \
  ", SymInt attention_chunk=0, SymInt? q_offset=None, "                                   \
  "Tensor? seqused_k=None, Tensor? leftpad_k=None, Tensor? attn_mask=None, "              \
  "Tensor? attn_bias=None, float softcap=0.0, Tensor? alibi_slopes=None, "                \
  "Tensor? learnable_sink=None, Tensor? q_rotary_cos=None, Tensor? q_rotary_sin=None, "   \
  "Tensor? k_rotary_cos=None, Tensor? k_rotary_sin=None, bool rotary_interleaved=False, " \
  "float dropout_p=0.0, Tensor? rng_state=None"
// The arguments of those that read no cache, and the parenthesis still open.
#define FLASH_FWD_ARGUMENTS "(Tensor q, Tensor k, Tensor v, *, " FLASH_FWD_OPTIONS
#define FLASH_VARLEN_FWD_ARGUMENTS                                            \
  "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, " \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, *, " FLASH_FWD_OPTIONS
#define FLASH_FWD_RESULT " -> (Tensor out, Tensor softmax_lse)"

#define FLASH_BWD_ARGUMENTS                                                \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, " \
  "Tensor softmax_lse, *, bool exact_delta=False, " FLASH_FWD_OPTIONS ")"
#define FLASH_VARLEN_BWD_ARGUMENTS                                                      \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "              \
  "Tensor softmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, " \
  "SymInt max_seqlen_k, *, bool exact_delta=False, " FLASH_FWD_OPTIONS ")"
#define FLASH_BWD_RESULT " -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor normalisers)"

#define FLASH_BWD_BIAS_ARGUMENTS                                                   \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, " \
  "*, Tensor? normalisers=None, " FLASH_FWD_OPTIONS ")"
#define FLASH_VARLEN_BWD_BIAS_ARGUMENTS                                                  \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, "       \
  "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, " \
  "*, Tensor? normalisers=None, " FLASH_FWD_OPTIONS ")"

namespace metal_attn {

inline constexpr char kFlashFwd[] =
    "flash_fwd" FLASH_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ")" FLASH_FWD_RESULT;
inline constexpr char kFlashVarlenFwd[] =
    "flash_varlen_fwd" FLASH_VARLEN_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ")" FLASH_FWD_RESULT;
inline constexpr char kFlashFwdExplain[] =
    "flash_fwd_explain" FLASH_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ") -> int[]";
inline constexpr char kFlashVarlenFwdExplain[] =
    "flash_varlen_fwd_explain" FLASH_VARLEN_FWD_ARGUMENTS ", " FLASH_CACHE_OPTIONS ") -> int[]";

// `run` of the op's arguments, which the dispatcher gives one by one.
template <auto run, typename... Options>
struct FlashFwdOp {
  using Tensor = torch::stable::Tensor;
  using Cached = CacheOptions::OptionalTensor;
  static auto dense(const Tensor& q, const Tensor& k, const Tensor& v, Options... options) {
    return run({q, k, v, std::nullopt, {options...}, {}});
  }
  static auto varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     Options... options) {
    return run({q,
                k,
                v,
                Packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                {options...},
                {}});
  }
  // The same of a cache.
  static auto dense_cached(const Tensor& q, const Tensor& k, const Tensor& v, Options... options,
                           Cached block_table, Cached cache_batch_idx, Cached k_scale,
                           Cached v_scale) {
    return run(
        {q, k, v, std::nullopt, {options...}, {block_table, cache_batch_idx, k_scale, v_scale}});
  }
  static auto varlen_cached(const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                            int64_t max_seqlen_q, int64_t max_seqlen_k, Options... options,
                            Cached block_table, Cached cache_batch_idx, Cached k_scale,
                            Cached v_scale) {
    return run({q,
                k,
                v,
                Packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                {options...},
                {block_table, cache_batch_idx, k_scale, v_scale}});
  }
};

// The types of FlashFwdOptions' fields.
template <auto run, typename OptionalTensor = FlashFwdOptions::OptionalTensor>
using FlashFwd =
    FlashFwdOp<run, std::optional<double>, bool, int64_t, int64_t, int64_t, std::optional<int64_t>,
               OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, double,
               OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
               OptionalTensor, bool, double, OptionalTensor>;

inline constexpr char kFlashBwd[] = "flash_bwd" FLASH_BWD_ARGUMENTS FLASH_BWD_RESULT;
inline constexpr char kFlashVarlenBwd[] =
    "flash_varlen_bwd" FLASH_VARLEN_BWD_ARGUMENTS FLASH_BWD_RESULT;
inline constexpr char kFlashBwdExplain[] = "flash_bwd_explain" FLASH_BWD_ARGUMENTS " -> int[]";
inline constexpr char kFlashVarlenBwdExplain[] =
    "flash_varlen_bwd_explain" FLASH_VARLEN_BWD_ARGUMENTS " -> int[]";
inline constexpr char kFlashBwdPlan[] = "flash_bwd_plan" FLASH_FWD_ARGUMENTS ") -> int[]";
inline constexpr char kFlashVarlenBwdPlan[] =
    "flash_varlen_bwd_plan" FLASH_VARLEN_FWD_ARGUMENTS ") -> int[]";

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

inline constexpr char kFlashBwdBias[] = "flash_bwd_bias" FLASH_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashVarlenBwdBias[] =
    "flash_varlen_bwd_bias" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashBwdBiasExplain[] =
    "flash_bwd_bias_explain" FLASH_BWD_BIAS_ARGUMENTS " -> int[]";
inline constexpr char kFlashVarlenBwdBiasExplain[] =
    "flash_varlen_bwd_bias_explain" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> int[]";
inline constexpr char kFlashBwdSlopes[] = "flash_bwd_slopes" FLASH_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashVarlenBwdSlopes[] =
    "flash_varlen_bwd_slopes" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> Tensor";
inline constexpr char kFlashBwdSlopesExplain[] =
    "flash_bwd_slopes_explain" FLASH_BWD_BIAS_ARGUMENTS " -> int[]";
inline constexpr char kFlashVarlenBwdSlopesExplain[] =
    "flash_varlen_bwd_slopes_explain" FLASH_VARLEN_BWD_BIAS_ARGUMENTS " -> int[]";

// `run` of the op's arguments, of which the forward's `make` takes its own.
template <auto run, typename Forward>
struct FlashBwdBiasOp;

template <auto run, auto make, typename... Options>
struct FlashBwdBiasOp<run, FlashFwdOp<make, Options...>> {
  using Tensor = torch::stable::Tensor;
  using OptionalTensor = FlashFwdOptions::OptionalTensor;
  static auto dense(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& lse, const Tensor& delta, const OptionalTensor& normalisers,
                    Options... options) {
    return run({dout, lse, delta, normalisers, {q, k, v, std::nullopt, {options...}, {}}});
  }
  static auto varlen(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& lse, const Tensor& delta, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     const OptionalTensor& normalisers, Options... options) {
    return run({dout,
                lse,
                delta,
                normalisers,
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
