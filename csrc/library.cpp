// Every op's schema, and what runs it on each device.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "csrc/ops/checks.h"
#include "csrc/ops/flash_fwd.h"

namespace {

using metal_attn::Backend;
using torch::stable::Tensor;

constexpr char kFlashFwd[] =
    "flash_fwd(Tensor q, Tensor k, Tensor v, *, float? softmax_scale=None, "
    "SymInt? causal_offset=None) -> (Tensor out, Tensor softmax_lse)";
constexpr char kFlashFwdExplain[] =
    "flash_fwd_explain(Tensor q, Tensor k, Tensor v, *, float? softmax_scale=None, "
    "SymInt? causal_offset=None) -> str";

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> flash_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                     std::optional<double> softmax_scale,
                                     std::optional<int64_t> causal_offset) {
  return metal_attn::flash_fwd({q, k, v, softmax_scale, causal_offset}, backend());
}

// For every device without a kernel of its own.
std::tuple<Tensor, Tensor> flash_fwd_elsewhere(const Tensor& q, const Tensor& k, const Tensor& v,
                                               std::optional<double> softmax_scale,
                                               std::optional<int64_t> causal_offset) {
  metal_attn::flash_fwd_explain({q, k, v, softmax_scale, causal_offset});
  throw std::runtime_error("metal_attn::flash_fwd has no kernel for " + metal_attn::device_text(q) +
                           ": import torch_metal_attn");
}

std::string flash_fwd_explain(const Tensor& q, const Tensor& k, const Tensor& v,
                              std::optional<double> softmax_scale,
                              std::optional<int64_t> causal_offset) {
  return metal_attn::flash_fwd_explain({q, k, v, softmax_scale, causal_offset});
}

}  // namespace

// What users call. The CPU kernels are in torch_metal_attn/ops.py: the reference, or the next one.
STABLE_TORCH_LIBRARY(metal_attn, m) {
  m.def(kFlashFwd);
  m.def(kFlashFwdExplain);
}

// The shaders on CPU tensors, always.
STABLE_TORCH_LIBRARY(metal_attn_simulator, m) { m.def(kFlashFwd); }

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CompositeExplicitAutograd, m) {
  m.impl("flash_fwd", TORCH_BOX(&flash_fwd_elsewhere));
  m.impl("flash_fwd_explain", TORCH_BOX(&flash_fwd_explain));
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn_simulator, CPU, m) {
  m.impl("flash_fwd", TORCH_BOX(&flash_fwd<metal_attn::simulator_backend>));
}

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn, MPS, m) {
  m.impl("flash_fwd", TORCH_BOX(&flash_fwd<metal_attn::mps_backend>));
}
#endif
