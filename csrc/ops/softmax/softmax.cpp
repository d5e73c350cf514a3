#include "csrc/ops/softmax/softmax.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

#include "csrc/ops/common/json.h"
#include "csrc/ops/softmax/check.h"
#include "csrc/ops/softmax/choose.h"
#include "csrc/ops/softmax/fill.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

// Whether any score is masked: the first query sees the fewest keys.
bool masks(const SoftmaxRows& rows, const Tensor& scores, int64_t q_offset) {
  return rows.count > 0 && q_offset + 1 < scores.size(scores.dim() - 1);
}

void run_softmax(const SoftmaxCall& call, const Tensor& out, Backend& backend) {
  if (call.rows.count == 0) {
    return;
  }
  SoftmaxRows rows = call.rows;
  rows.wide_loads = rows.wide_loads && wide_rows(out);
  backend.run(softmax_launch(call, choose_softmax(rows), out));
}

// The result's layout without its memory.
Tensor empty_meta_like(const Tensor& x) {
  using torch::stable::detail::from;
  const torch::stable::Device meta(torch::headeronly::DeviceType::Meta);
  std::array<StableIValue, 6> stack{from(x),
                                    from(std::nullopt),
                                    from(std::nullopt),
                                    from(std::optional<torch::stable::Device>(meta)),
                                    from(std::nullopt),
                                    from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

PackedText explanation(const char* kernel, const Tensor& tensor, const SoftmaxRows& rows,
                       bool launches, const char* nothing) {
  const SoftmaxSpecialisation s = choose_softmax(rows);
  const std::string reason =
      s.row_simdgroups == 1
          ? "rows of " + std::to_string(rows.length) + " are short: a SIMD group each"
          : "rows of " + std::to_string(rows.length) + " are long: a threadgroup each";
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", s.defines())
      .add("grid", launches ? softmax_threadgroups(rows, s) : std::array<uint32_t, 3>{})
      .add("threads", std::array<uint32_t, 3>{s.threads(), 1, 1})
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("backend", tensor.is_cpu() ? "simulator" : "mps")
      .add("reason", launches ? reason : nothing)
      .packed();
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = check_softmax(x, dim, false);
  const Tensor out = torch::stable::empty_like(x);
  run_softmax(call, axis_last(out, dim), backend);
  return out;
}

Tensor softmax_inplace(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = check_softmax(x, dim, true);
  run_softmax(call, call.x, backend);
  return x;
}

Tensor apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset, Backend& backend) {
  const SoftmaxRows rows = check_causal_mask(scores, q_offset);
  if (masks(rows, scores, q_offset)) {
    backend.run(causal_mask_launch(rows, choose_softmax(rows), scores, q_offset));
  }
  return scores;
}

PackedText softmax_explain(const Tensor& x, int64_t dim, bool in_place) {
  SoftmaxRows rows = check_softmax(x, dim, in_place).rows;
  rows.wide_loads = rows.wide_loads && (in_place || wide_rows(axis_last(empty_meta_like(x), dim)));
  return explanation("softmax", x, rows, rows.count > 0,
                     "nothing to compute: x is empty, so no kernel is launched");
}

PackedText apply_causal_mask_explain(const Tensor& scores, int64_t q_offset) {
  const SoftmaxRows rows = check_causal_mask(scores, q_offset);
  return explanation("apply_causal_mask", scores, rows, masks(rows, scores, q_offset),
                     "no score is masked, so no kernel is launched");
}

}  // namespace metal_attn
