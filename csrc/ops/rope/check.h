// What the ops of rope refuse, and what is left to know of their arguments.
#pragma once

#include "csrc/problem/rope.h"

namespace metal_attn {

RopeProblem check_rope(const RopeArguments& arguments, bool in_place);

RopeTablesProblem check_rope_tables(const RopeTablesArguments& arguments);

}  // namespace metal_attn
