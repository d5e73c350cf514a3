#include "csrc/ops/rope/rope.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/rope/check.h"
#include "csrc/ops/rope/choose.h"
#include "csrc/ops/rope/fill.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

PackedText explanation(const char* kernel, const Defines& defines, const Grid& grid,
                       const Tensor& first, const std::string& reason) {
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", defines)
      .add("grid", grid.threadgroups)
      .add("threads", grid.threads)
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", first.is_cpu() ? "simulator" : "mps")
      .add("reason", reason)
      .packed();
}

}  // namespace

std::tuple<Tensor, Tensor> rope(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, false);
  const RopeSpecialisation s = choose_rope(a, p);
  Tensor q_out = new_empty_like(a.q);
  Tensor k_out = a.k.has_value() ? new_empty_like(*a.k) : new_empty(a.q, {0}, a.q.scalar_type());
  if (p.launches()) {
    backend.run(rope_launch(a, p, s, q_out, k_out));
  }
  return {q_out, k_out};
}

void rope_inplace(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, true);
  const RopeSpecialisation s = choose_rope(a, p);
  if (p.launches()) {
    backend.run(rope_launch(a, p, s, a.q, a.k.has_value() ? *a.k : a.q));
  }
}

std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& a, Backend& backend) {
  const RopeTablesProblem p = check_rope_tables(a);
  const Grid grid = rope_tables_grid(p);
  Dims sizes = sizes_of(a.positions);
  sizes.push_back(p.columns);
  Tensor cos = new_empty(a.inv_freq, sizes, p.dtype);
  Tensor sin = new_empty(a.inv_freq, sizes, p.dtype);
  if (p.launches()) {
    backend.run(rope_tables_launch(a, p, grid, cos, sin));
  }
  return {cos, sin};
}

PackedText rope_explain(const RopeArguments& a, bool in_place) {
  const RopeProblem p = check_rope(a, in_place);
  const RopeSpecialisation s = choose_rope(a, p);
  const std::string reason = p.launches()
                                 ? std::to_string(s.vector) + " pairs of columns a thread, for " +
                                       std::to_string(s.shares.heads) + " heads"
                                 : "nothing to rotate: no kernel is launched";
  return explanation("rope", rope_defines(p, s), s.grid, a.q, reason);
}

PackedText rope_tables_explain(const RopeTablesArguments& a) {
  const RopeTablesProblem p = check_rope_tables(a);
  return explanation(
      "rope_tables", rope_tables_defines(p), rope_tables_grid(p), a.inv_freq,
      p.launches() ? "one cos and sin a thread" : "the tables are empty: no kernel is launched");
}

}  // namespace metal_attn
