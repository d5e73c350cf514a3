#include "csrc/ops/softmax/softmax.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

#include "csrc/ops/common/recorder.h"
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

void run(const Launch& launch, const SoftmaxRows& rows, const SoftmaxSpecialisation& s,
         Backend& backend) {
  note(backend, [&] {
    const std::string size =
        s.row_simdgroups == 1 ? " are short: a SIMD group each" : " are long: a threadgroup each";
    return JsonObject()
        .add("threadgroup_bytes", s.threadgroup_bytes())
        .add("reason", "rows of " + std::to_string(rows.length) + size);
  });
  backend.run(launch);
}

void run_softmax(const SoftmaxCall& call, const Tensor& out, Backend& backend) {
  if (call.rows.count == 0) {
    return;
  }
  SoftmaxRows rows = call.rows;
  rows.wide_loads = rows.wide_loads && wide_rows(out);
  const SoftmaxSpecialisation s = choose_softmax(rows);
  run(softmax_launch(call, s, out), rows, s, backend);
}

// As torch's: a result has the layout of its argument.
Tensor new_like(const Tensor& x) {
  using torch::stable::detail::from;
  const torch::stable::Device meta(torch::headeronly::DeviceType::Meta);
  const auto device = is_recording() ? std::optional(meta) : std::nullopt;
  std::array<StableIValue, 6> stack{from(x),      from(std::nullopt), from(std::nullopt),
                                    from(device), from(std::nullopt), from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = check_softmax(x, dim, false);
  const Tensor out = new_like(x);
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
    const SoftmaxSpecialisation s = choose_softmax(rows);
    run(causal_mask_launch(rows, s, scores, q_offset), rows, s, backend);
  }
  return scores;
}

}  // namespace metal_attn
