// How the kernels of rope are specialised, and their grids.
#pragma once

#include <cstdint>

#include "csrc/ops/common/grid.h"
#include "csrc/ops/rope/rotation.h"
#include "csrc/problem/rope.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

struct RopeSpecialisation {
  int vector;  // pairs of columns that a thread rotates
  HeadShares shares;
  int32_t pair_units;  // vectors of a row's pairs
  int32_t units;       // and of the columns that are copied
  Grid grid;
};

// Throws std::invalid_argument for a grid that Metal cannot count.
RopeSpecialisation choose_rope(const RopeArguments& arguments, const RopeProblem& problem);

Defines rope_defines(const RopeProblem& problem, const RopeSpecialisation& specialisation);

Grid rope_tables_grid(const RopeTablesProblem& problem);

Defines rope_tables_defines(const RopeTablesProblem& problem);

}  // namespace metal_attn
