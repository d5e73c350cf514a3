#include "csrc/tiles/flash_fwd_tensor.h"

#include <algorithm>
#include <optional>

#include "csrc/tiles/shared.h"
#include "csrc/tiles/tensor.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// Loads of a thread for 32 keys and 16 queries.
int cost(const FlashFwdSpecialisation& s) {
  const int keys = 4 * (spans(s.head_dim_qk) + spans(s.v_slice)) * unit_loads(kv_element(s));
  const int again = 2 * spans(s.head_dim_qk) * unit_loads(s.element) * row_loads(s);
  const int q = s.q_in_registers ? 0 : again;
  return s.v_slices() * (keys + q);
}

}  // namespace

// The output, q if it is held, scores, a span of k or v, and the products with it or the second
// chain of scores.
int tensor_registers(const FlashFwdSpecialisation& s) {
  constexpr int kOthers = 40;
  const int q = s.q_in_registers ? spans(s.head_dim_qk) * tensor_operand(s.element) : 0;
  return kOthers + spans(s.v_slice) * kTensorResult + q + 2 * kTensorResult +
         2 * tensor_operand(kv_element(s)) + feature_registers(s.features);
}

FlashFwdSpecialisation choose_flash_fwd_tensor(const FlashFwdProblem& problem) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.tensor_tiles = true;
  s.simdgroups = parts_within(s.features.q_block(), kTensorRows, kSimdgroups);
  s.row_fragments = 2;
  s.block_k = kTensorSpan;
  s.kv_staged = 1;
  s.wide_loads = s.wide_loads && problem.q_aligned;
  s.wide_rotary = s.wide_loads && wide_rotary(problem);

  // The fewest loads of what fits. The narrowest slice is taken in any case.
  std::optional<FlashFwdSpecialisation> best;
  for (int slices = 1; !best; ++slices) {
    s.v_slice = kTensorSpan * ((spans(problem.head_dim_v) + slices - 1) / slices);
    for (bool held : {true, false}) {
      s.q_in_registers = held;
      if ((tensor_registers(s) <= kTensorRegisters || s.v_slice == kTensorSpan) &&
          (!best || cost(s) < cost(*best))) {
        best = s;
      }
    }
  }
  return *best;
}

}  // namespace metal_attn
