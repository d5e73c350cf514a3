#include "csrc/ops/merge/fill.h"

#include <cstdint>

#include "csrc/problem/strides.h"
#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

RowStrides mask_strides(const Tensor& mask) {
  return mask.dim() == 1 ? RowStrides{0, 0, mask.stride(0)}
                         : RowStrides{mask.stride(0), 0, mask.stride(1)};
}

Launch launch_of(const char* kernel, const MergeProblem& p, const MergeSpecialisation& s) {
  Launch launch;
  launch.program.family = "merge";
  launch.kernel = kernel;
  launch.program.defines = merge_defines(p, s);
  launch.threadgroups = s.grid.threadgroups;
  launch.threads = s.grid.threads;
  return launch;
}

}  // namespace

Launch merge_state_launch(const MergeStateArguments& a, const std::optional<Tensor>& mask,
                          const MergeProblem& p, const MergeSpecialisation& s, const Tensor& out,
                          const Tensor& lse) {
  MergeStateParams params{};
  params.out_a_strides = row_strides(a.out_a);
  params.lse_a_strides = statistics_strides(a.lse_a);
  params.out_b_strides = row_strides(a.out_b);
  params.lse_b_strides = statistics_strides(a.lse_b);
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  if (mask) {
    params.mask_strides = mask_strides(*mask);
  }
  params.shape = p.shape;

  Launch launch = launch_of("merge_state", p, s);
  if (!p.in_place) {
    launch.buffers.push_back({MERGE_STATE_OUT_A, a.out_a, false});
    launch.buffers.push_back({MERGE_STATE_LSE_A, a.lse_a, false});
  }
  launch.buffers.push_back({MERGE_STATE_OUT_B, a.out_b, false});
  launch.buffers.push_back({MERGE_STATE_LSE_B, a.lse_b, false});
  launch.buffers.push_back({MERGE_STATE_OUT, out, true});
  launch.buffers.push_back({MERGE_STATE_LSE, lse, true});
  if (mask) {
    launch.buffers.push_back({MERGE_STATE_MASK, *mask, false});
  }
  launch.params_slot = MERGE_STATE_PARAMS;
  launch.params.set(params);
  return launch;
}

Launch merge_splits_launch(const Tensor& partial_out, const Tensor& partial_lse,
                           const std::optional<Tensor>& sink, const MergeProblem& p,
                           const MergeSpecialisation& s, const Tensor& out, const Tensor& lse) {
  MergeSplitsParams params{};
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  params.shape = p.shape;
  params.splits = static_cast<int32_t>(partial_out.size(3));

  Launch launch = launch_of("merge_splits", p, s);
  launch.buffers = {{MERGE_SPLITS_PARTIAL_OUT, partial_out, false},
                    {MERGE_SPLITS_PARTIAL_LSE, partial_lse, false},
                    {MERGE_SPLITS_OUT, out, true},
                    {MERGE_SPLITS_LSE, lse, true}};
  if (sink) {
    launch.buffers.push_back({MERGE_SPLITS_SINK, *sink, false});
  }
  launch.params_slot = MERGE_SPLITS_PARAMS;
  launch.params.set(params);
  return launch;
}

}  // namespace metal_attn
