#include "csrc/ops/rope/rope.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/rope/check.h"
#include "csrc/ops/rope/choose.h"
#include "csrc/ops/rope/fill.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

void run(const Launch& launch, const RopeSpecialisation& s, Backend& backend) {
  note(backend, [&s] {
    return JsonObject().add("reason", std::to_string(s.vector) +
                                          " pairs of columns a thread, for " +
                                          std::to_string(s.shares.heads) + " heads");
  });
  backend.run(launch);
}

}  // namespace

std::tuple<Tensor, Tensor> rope(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, false);
  const RopeSpecialisation s = choose_rope(a, p);
  Tensor q_out = new_empty_like(a.q);
  Tensor k_out = a.k.has_value() ? new_empty_like(*a.k) : new_empty(a.q, {0}, a.q.scalar_type());
  if (p.launches()) {
    run(rope_launch(a, p, s, q_out, k_out), s, backend);
  }
  return {q_out, k_out};
}

void rope_inplace(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, true);
  const RopeSpecialisation s = choose_rope(a, p);
  if (p.launches()) {
    run(rope_launch(a, p, s, a.q, a.k.has_value() ? *a.k : a.q), s, backend);
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
    note(backend, [] { return JsonObject().add("reason", "one cos and sin a thread"); });
    backend.run(rope_tables_launch(a, p, grid, cos, sin));
  }
  return {cos, sin};
}

}  // namespace metal_attn
