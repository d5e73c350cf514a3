// Functions that the tiles of all kernels of attention share, including decoding.
#pragma once

#include "csrc/tiles/table.h"

namespace metal_attn {

inline int fragments(int columns) { return (columns + 7) / 8; }

// The columns of each slice, a multiple of `unit`.
inline int slice_columns(int columns, int slices, int unit) {
  const int units = (columns + unit - 1) / unit;
  return unit * ((units + slices - 1) / slices);
}

// The largest p <= most such that p * rows divides the block, or 0. Without a BlockMask the block
// is 0, and the result is `most`.
inline int parts_within(int block, int rows, int most) {
  while (most > 0 && block % (rows * most) != 0) { --most; }
  return most;
}

bool wide_loads(const FlashFwdProblem& problem);
bool wide_rotary(const FlashFwdProblem& problem);

// A specialisation with the fields that every kernel of attention copies from the problem.
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

// Columns of the result of one tensor operation, and the keys of a forward's block.
inline constexpr int kTensorSpan = 32;

// Columns of a span: four lanes load 8 neighbouring columns each (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

}  // namespace metal_attn
