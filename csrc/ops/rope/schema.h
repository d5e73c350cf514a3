// The schemas of rope's ops, and the conversion of the dispatcher's arguments to structs.
#pragma once

#include "csrc/ops/common/arguments.h"
#include "csrc/problem/rope.h"

// In the order of RopeArguments.
#define ROPE_OPTIONS                                                            \
  "Tensor cos, Tensor sin, *, Tensor? positions=None, SymInt seqlen_offset=0, " \
  "Tensor? seqlen_offsets=None, bool interleaved=False, bool conjugate=False"
#define ROPE_ARGUMENTS "(Tensor q, Tensor? k, " ROPE_OPTIONS
#define ROPE_INPLACE_ARGUMENTS "(Tensor(a!) q, Tensor(b!)? k, " ROPE_OPTIONS
#define ROPE_TABLES_ARGUMENTS                                                       \
  "(Tensor inv_freq, Tensor positions, *, float attention_factor=1.0, ScalarType? " \
  "dtype=None"

namespace metal_attn {

template <auto run>
using Rope = InStruct<run, RopeArguments, TensorArgument, OptionalTensor, TensorArgument,
                      TensorArgument, OptionalTensor, int64_t, OptionalTensor, bool, bool>;
template <auto run>
using RopeTables = InStruct<run, RopeTablesArguments, TensorArgument, TensorArgument, double,
                            std::optional<ScalarType>>;

}  // namespace metal_attn
