// How the arguments of an op, which the dispatcher gives one by one, become those of a function.
#pragma once

#include "csrc/problem/options.h"

namespace metal_attn {

using TensorArgument = const torch::stable::Tensor&;

// `run` of the arguments as they are.
template <auto run, class... Given>
struct AsGiven {
  static auto call(Given... given) { return run(given...); }
};

// `run` of a struct that has them as its fields, in their order.
template <auto run, class Struct, class... Fields>
struct InStruct {
  static auto call(Fields... fields) { return run(Struct{fields...}); }
};

}  // namespace metal_attn
