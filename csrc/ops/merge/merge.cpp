#include "csrc/ops/merge/merge.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/merge/check.h"
#include "csrc/ops/merge/choose.h"
#include "csrc/ops/merge/fill.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

PackedText explanation(const char* kernel, const MergeProblem& p, const MergeSpecialisation& s,
                       const Tensor& first, const char* unit) {
  const std::string loads =
      s.wide_loads ? "16-byte loads" : "element-wise loads, as some row is not 16-byte aligned";
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", merge_defines(p, s))
      .add("grid", s.grid.threadgroups)
      .add("threads", s.grid.threads)
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", first.is_cpu() ? "simulator" : "mps")
      .add("reason", s.grid.threadgroups[1] > 0 ? loads + ", " + unit
                                                : "there are no rows, so no kernel is launched")
      .packed();
}

void run_state(const MergeStateArguments& a, const std::optional<Tensor>& mask,
               const MergeProblem& p, const Tensor& out, const Tensor& lse, Backend& backend) {
  if (p.shape.rows > 0) {
    backend.run(merge_state_launch(a, mask, p, choose_merge_state(a, p), out, lse));
  }
}

void run_splits(const Tensor& partial_out, const Tensor& partial_lse,
                const std::optional<Tensor>& sink, const MergeProblem& p, bool out_aligned,
                const Tensor& out, const Tensor& lse, Backend& backend) {
  if (p.shape.rows > 0) {
    const MergeSpecialisation s = choose_merge_splits(partial_out, p, out_aligned);
    backend.run(merge_splits_launch(partial_out, partial_lse, sink, p, s, out, lse));
  }
}

}  // namespace

std::tuple<Tensor, Tensor> merge_state(const MergeStateArguments& a, Backend& backend) {
  const MergeProblem p = check_merge_state(a, false, std::nullopt);
  Tensor out = new_empty_like(a.out_a);
  Tensor lse = new_empty(a.lse_a, sizes_of(a.lse_a), ScalarType::Float);
  run_state(a, std::nullopt, p, out, lse, backend);
  return {out, lse};
}

void merge_state_inplace(const MergeStateArguments& a, const std::optional<Tensor>& mask,
                         Backend& backend) {
  run_state(a, mask, check_merge_state(a, true, mask), a.out_a, a.lse_a, backend);
}

std::tuple<Tensor, Tensor> merge_splits(const MergeSplitsArguments& a, Backend& backend) {
  const MergeProblem p = check_merge_splits(a);
  const auto partial_sizes = a.partial_out.sizes();
  Dims sizes(partial_sizes.begin(), partial_sizes.begin() + 3);
  Tensor lse = new_empty(a.partial_lse, sizes, ScalarType::Float);
  sizes.push_back(partial_sizes[4]);
  Tensor out = new_empty(a.partial_out, sizes, p.out_dtype);
  run_splits(a.partial_out, a.partial_lse, a.learnable_sink, p, dense_rows_aligned_16(p), out, lse,
             backend);
  return {out, lse};
}

void merge_splits(const Tensor& partial_out, const Tensor& partial_lse,
                  const std::optional<Tensor>& sink, Tensor& out, Tensor& lse, Backend& backend) {
  const MergeProblem p =
      check_merge_splits({partial_out, partial_lse, out.scalar_type(), sink, false});
  run_splits(partial_out, partial_lse, sink, p, rows_aligned_16(out), out, lse, backend);
}

PackedText merge_state_explain(const MergeStateArguments& a, bool inplace,
                               const std::optional<Tensor>& mask) {
  const MergeProblem p = check_merge_state(a, inplace, mask);
  return explanation("merge_state", p, choose_merge_state(a, p), a.out_a, "one a thread");
}

PackedText merge_splits_explain(const MergeSplitsArguments& a) {
  const MergeProblem p = check_merge_splits(a);
  const MergeSpecialisation s = choose_merge_splits(a.partial_out, p, dense_rows_aligned_16(p));
  return explanation("merge_splits", p, s, a.partial_out, "32 splits at a time");
}

}  // namespace metal_attn
