// Counts that the tiles of all kernels of attention share, including decoding.
#pragma once

#include "csrc/tiles/table.h"

namespace metal_attn {

inline int fragments(int columns) { return (columns + 7) / 8; }

// Columns of each of so many slices, a multiple of `unit`.
inline int slice_columns(int columns, int slices, int unit) {
  const int units = (columns + unit - 1) / unit;
  return unit * ((units + slices - 1) / slices);
}

// The largest p <= most such that p * rows divides the block; 0 if there is none. Without a
// BlockMask the block is 0, which any rows divide.
inline int parts_within(int block, int rows, int most) {
  while (most > 0 && block % (rows * most) != 0) { --most; }
  return most;
}

bool wide_loads(const FlashFwdProblem& problem);
bool wide_rotary(const FlashFwdProblem& problem);

// The fields of a problem that every kernel of attention takes unchanged.
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

// Columns of one product's result on tensor tiles, and the keys of a forward's block.
inline constexpr int kTensorSpan = 32;

// Columns that a lane's loads of 8 neighbours are spread over (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

}  // namespace metal_attn
