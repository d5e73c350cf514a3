// Every op's schema, and what runs it on each device.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "csrc/ops/checks.h"
#include "csrc/ops/flash_fwd.h"

namespace {

using metal_attn::Backend;
using metal_attn::FlashFwdArguments;
using metal_attn::Packing;
using torch::stable::Tensor;

// In the order of FlashFwdOptions.
#define FLASH_FWD_OPTIONS                                                               \
  "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, "          \
  "SymInt window_size_right=-1, SymInt attention_chunk=0, SymInt? q_offset=None, "      \
  "Tensor? seqused_k=None, Tensor? leftpad_k=None, Tensor? attn_mask=None, "            \
  "Tensor? attn_bias=None, float softcap=0.0, Tensor? alibi_slopes=None, "              \
  "Tensor? learnable_sink=None, Tensor? q_rotary_cos=None, Tensor? q_rotary_sin=None, " \
  "Tensor? k_rotary_cos=None, Tensor? k_rotary_sin=None, bool rotary_interleaved=False"
#define FLASH_FWD_ARGUMENTS "(Tensor q, Tensor k, Tensor v, *, " FLASH_FWD_OPTIONS ")"
#define FLASH_VARLEN_FWD_ARGUMENTS                                            \
  "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, " \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, *, " FLASH_FWD_OPTIONS ")"
#define FLASH_FWD_RESULT " -> (Tensor out, Tensor softmax_lse)"

constexpr char kFlashFwd[] = "flash_fwd" FLASH_FWD_ARGUMENTS FLASH_FWD_RESULT;
constexpr char kFlashVarlenFwd[] = "flash_varlen_fwd" FLASH_VARLEN_FWD_ARGUMENTS FLASH_FWD_RESULT;
constexpr char kFlashFwdExplain[] = "flash_fwd_explain" FLASH_FWD_ARGUMENTS " -> str";
constexpr char kFlashVarlenFwdExplain[] =
    "flash_varlen_fwd_explain" FLASH_VARLEN_FWD_ARGUMENTS " -> str";

// The op's arguments, one by one as the dispatcher gives them, as FlashFwdArguments.
template <auto run, typename... Options>
struct FlashFwdOp {
  static auto dense(const Tensor& q, const Tensor& k, const Tensor& v, Options... options) {
    return run({q, k, v, std::nullopt, {options...}});
  }
  static auto varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     Options... options) {
    return run(
        {q, k, v, Packing{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k}, {options...}});
  }
};

// The types of FlashFwdOptions' fields.
template <auto run>
using FlashFwd =
    FlashFwdOp<run, std::optional<double>, bool, int64_t, int64_t, int64_t, std::optional<int64_t>,
               std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
               std::optional<Tensor>, double, std::optional<Tensor>, std::optional<Tensor>,
               std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
               std::optional<Tensor>, bool>;

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments) {
  return metal_attn::flash_fwd(arguments, backend());
}

// For every device without a kernel of its own.
std::tuple<Tensor, Tensor> flash_fwd_elsewhere(const FlashFwdArguments& arguments) {
  metal_attn::flash_fwd_explain(arguments);
  throw std::runtime_error("metal_attn::flash_fwd has no kernel for " +
                           metal_attn::device_text(arguments.q) + ": import torch_metal_attn");
}

}  // namespace

// What users call. The CPU kernels are in torch_metal_attn/ops/: the reference, or the next one.
STABLE_TORCH_LIBRARY(metal_attn, m) {
  m.def(kFlashFwd);
  m.def(kFlashVarlenFwd);
  m.def(kFlashFwdExplain);
  m.def(kFlashVarlenFwdExplain);
}

// The shaders on CPU tensors, always.
STABLE_TORCH_LIBRARY(metal_attn_simulator, m) {
  m.def(kFlashFwd);
  m.def(kFlashVarlenFwd);
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CompositeExplicitAutograd, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd_elsewhere>::dense));
  m.impl("flash_varlen_fwd", TORCH_BOX(&FlashFwd<flash_fwd_elsewhere>::varlen));
  m.impl("flash_fwd_explain", TORCH_BOX(&FlashFwd<metal_attn::flash_fwd_explain>::dense));
  m.impl("flash_varlen_fwd_explain", TORCH_BOX(&FlashFwd<metal_attn::flash_fwd_explain>::varlen));
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn_simulator, CPU, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::simulator_backend>>::dense));
  m.impl("flash_varlen_fwd",
         TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::simulator_backend>>::varlen));
}

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn, MPS, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::mps_backend>>::dense));
  m.impl("flash_varlen_fwd", TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::mps_backend>>::varlen));
}
#endif
