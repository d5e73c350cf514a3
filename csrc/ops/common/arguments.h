// Converts the arguments of an op, which the dispatcher passes one by one, to those of `run`.
#pragma once

#include "csrc/problem/options.h"

// The part of an option in a schema, in a function's parameters, and in a struct's values.
#define OPTION_SCHEMA(TYPE, NAME, DEFAULT, STEP) ", " SCHEMA_##TYPE " " #NAME "=" #DEFAULT
#define OPTION_PARAMETER(TYPE, NAME, DEFAULT, STEP) , metal_attn::TYPE NAME
#define OPTION_VALUE(TYPE, NAME, DEFAULT, STEP) NAME,

namespace metal_attn {

using TensorArgument = const Tensor&;

template <auto run, class... Arguments>
struct Unchanged {
  static auto call(Arguments... arguments) { return run(arguments...); }
};

// The arguments are the fields of a struct, in the order of the struct.
template <auto run, class Struct, class... Fields>
struct InStruct {
  static auto call(Fields... fields) { return run(Struct{fields...}); }
};

}  // namespace metal_attn
