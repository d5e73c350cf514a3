#include "csrc/ops/merge/merge.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/merge/check.h"
#include "csrc/ops/merge/choose.h"
#include "csrc/ops/merge/fill.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run(const Launch& launch, const MergeSpecialisation& s, const char* unit, Backend& backend) {
  note(backend, [&] {
    const std::string loads =
        s.wide_loads ? "16-byte loads" : "element-wise loads, as some row is not 16-byte aligned";
    return JsonObject().add("reason", loads + ", " + unit);
  });
  backend.run(launch);
}

void run_state(const MergeStateArguments& a, const std::optional<Tensor>& mask,
               const MergeProblem& p, const Tensor& out, const Tensor& lse, Backend& backend) {
  if (p.shape.rows > 0) {
    const MergeSpecialisation s = choose_merge_state(a, p);
    run(merge_state_launch(a, mask, p, s, out, lse), s, "one a thread", backend);
  }
}

void run_splits(const Tensor& partial_out, const Tensor& partial_lse,
                const std::optional<Tensor>& sink, const MergeProblem& p, bool out_aligned,
                const Tensor& out, const Tensor& lse, Backend& backend) {
  if (p.shape.rows > 0) {
    const MergeSpecialisation s = choose_merge_splits(partial_out, p, out_aligned);
    run(merge_splits_launch(partial_out, partial_lse, sink, p, s, out, lse), s,
        "32 splits at a time", backend);
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

}  // namespace metal_attn
