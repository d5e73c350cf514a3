#include "csrc/tiles/shared.h"

#include "csrc/problem/rope.h"

namespace metal_attn {

bool wide_loads(const FlashFwdProblem& problem) {
  return problem.aligned && problem.head_dim_qk % 8 == 0 && problem.head_dim_v % 8 == 0;
}

bool wide_rotary(const FlashFwdProblem& problem) {
  if (!problem.features.rotary) { return false; }
  const FusedRotary& rotary = *problem.features.rotary;
  return wide_loads(problem) && rotary.aligned &&
         rotates_by_chunks(problem.element, rotary.first, rotary.dim, rotary.interleaved);
}

RegisterPressure register_pressure_of(const FlashFwdFeatures& f) {
  if (f.rotary) { return RegisterPressure::kRotary; }
  const bool heavy = f.dropout || f.bias || f.flex || f.unpaired_keys() || f.cache.page_size > 0 ||
                     f.cache.formats.quantised();
  return heavy ? RegisterPressure::kHeavy : RegisterPressure::kLight;
}

}  // namespace metal_attn
