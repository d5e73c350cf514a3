// What the choosers of all kernels of attention share, decoding among them: how tiles are counted,
// and the defines of features.
#pragma once

#include <cstdint>

#include "csrc/ops/attention/types.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

// A core has about 208 KB of registers. 116 of them for tiles, plus about 40 for addresses, softmax
// state and fragments in flight, leave room for 10 SIMD groups a core: two or three threadgroups.
// Reckoned from published figures; nobody here could measure it.
inline constexpr int kRegisterBudget = 116;

// Four SIMD groups share one staged tile: fewer would stage each key more often, more would make
// threadgroups too big to keep two on a core.
inline constexpr int kSimdgroups = 4;

inline int fragments(int columns) { return (columns + 7) / 8; }

// A thread holds two of a fragment's 64 elements.
inline int fragment_registers(int bytes) { return 2 * bytes / 4; }

// That keep a core busy, as with kRegisterBudget.
inline constexpr int64_t kThreadgroupsPerCore = 3;

// What tiles and fragments of k and v hold.
template <class Specialisation>
Element kv_element(const Specialisation& s) {
  return s.features.cache.element.value_or(s.element);
}

bool wide_loads(const FlashFwdProblem& problem);
bool wide_rotary(const FlashFwdProblem& problem);

// What every kernel of attention takes from a problem as it is.
template <class Specialisation>
Specialisation specialisation_for(const FlashFwdProblem& problem) {
  Specialisation s{};
  s.element = problem.element;
  s.head_dim_qk = problem.head_dim_qk;
  s.head_dim_v = problem.head_dim_v;
  s.wide_loads = wide_loads(problem);
  s.features = problem.features;
  return s;
}

template <class Specialisation>
bool fits(const Specialisation& s) {
  return s.registers() <= kRegisterBudget && s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

void append_features(Defines& defines, const FlashFwdFeatures& features, bool wide_rotary);

// The defines that every kernel of attention has, its own, and those of the features.
template <class Specialisation>
Defines all_defines(const Specialisation& s, const Defines& own, bool wide_rotary) {
  Defines defines{
      {"ELEMENT", element_name(s.element)}, {"HEAD_DIM_QK", s.head_dim_qk},
      {"HEAD_DIM_V", s.head_dim_v},         {"ROW_FRAGMENTS", s.row_fragments},
      {"WIDE_LOADS", s.wide_loads},
  };
  defines.append(own.begin(), own.end());
  append_features(defines, s.features, wide_rotary);
  return defines;
}

}  // namespace metal_attn
