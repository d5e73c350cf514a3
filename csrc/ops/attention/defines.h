// The defines of a specialisation of attention's kernels.
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

void define_features(Defines& defines, const FlashFwdFeatures& features, bool wide_rotary);

// The defines that all kernels of attention have, then `specific`, then those of the features.
template <class Specialisation>
Defines all_defines(const Specialisation& s, const Defines& specific) {
  Defines defines{
      {"ELEMENT", element_name(s.element)}, {"HEAD_DIM_QK", s.head_dim_qk},
      {"HEAD_DIM_V", s.head_dim_v},         {"ROW_FRAGMENTS", s.row_fragments},
      {"WIDE_LOADS", s.wide_loads},
  };
  defines.append(specific.begin(), specific.end());
  define_features(defines, s.features, s.wide_rotary);
  return defines;
}

}  // namespace metal_attn
