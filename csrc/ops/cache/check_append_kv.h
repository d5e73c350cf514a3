// What append_kv refuses, and what is left to know about its arguments.
#pragma once

#include "csrc/problem/cache.h"

namespace metal_attn {

AppendKvProblem check_append_kv(const AppendKvArguments& arguments);

}  // namespace metal_attn
