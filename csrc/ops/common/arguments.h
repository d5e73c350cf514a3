// How the arguments of an op, which the dispatcher gives one by one, become those of a function.
#pragma once

#include "csrc/problem/options.h"

// An option's part of a schema, of a function's parameters, and of a struct's values.
#define OPTION_SCHEMA(TYPE, NAME, DEFAULT, STEP) ", " SCHEMA_##TYPE " " #NAME "=" #DEFAULT
#define OPTION_PARAMETER(TYPE, NAME, DEFAULT, STEP) , metal_attn::TYPE NAME
#define OPTION_VALUE(TYPE, NAME, DEFAULT, STEP) NAME,

namespace metal_attn {

using TensorArgument = const Tensor&;

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
