// What the tiles of all kernels of attention share, decoding among them: how they are counted.
#pragma once

#include <cstdint>

#include "csrc/problem/attention.h"
#include "csrc/tiles/table.h"

namespace metal_attn {

inline int fragments(int columns) { return (columns + 7) / 8; }

// Columns of each of so many slices, a multiple of `unit`.
inline int slice_columns(int columns, int slices, int unit) {
  const int units = (columns + unit - 1) / unit;
  return unit * ((units + slices - 1) / slices);
}

// The most parts, up to `most`, of which each of `rows` divides a BlockMask's block; 0: there is no
// such number. Any rows divide a block of 0, as there is without a BlockMask.
inline int parts_within(int block, int rows, int most) {
  while (most > 0 && block % (rows * most) != 0) {
    --most;
  }
  return most;
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

// Of tensor tiles, columns of one product's result: also the keys of a forward's block.
inline constexpr int kTensorSpan = 32;

// Columns that a lane's loads of 8 neighbours are spread over (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

}  // namespace metal_attn
