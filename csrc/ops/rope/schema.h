// The schemas of rope's ops, and how the dispatcher's arguments become RopeArguments.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

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

// The ops' arguments, one by one as the dispatcher gives them, as RopeArguments.
template <auto run>
struct Rope {
  static auto call(const torch::stable::Tensor& q, std::optional<torch::stable::Tensor> k,
                   const torch::stable::Tensor& cos, const torch::stable::Tensor& sin,
                   std::optional<torch::stable::Tensor> positions, int64_t seqlen_offset,
                   std::optional<torch::stable::Tensor> seqlen_offsets, bool interleaved,
                   bool conjugate) {
    return run(RopeArguments{q, k, cos, sin, positions, seqlen_offset, seqlen_offsets, interleaved,
                             conjugate});
  }
};

template <auto run>
struct RopeTables {
  static auto call(const torch::stable::Tensor& inv_freq, const torch::stable::Tensor& positions,
                   double attention_factor, std::optional<torch::headeronly::ScalarType> dtype) {
    return run(RopeTablesArguments{inv_freq, positions, attention_factor, dtype});
  }
};

}  // namespace metal_attn
