// metal_attn::rope, rope_ and rope_tables: rotary position embeddings.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// q: (B, Hq, L, D) and k, if there is one: (B, Hkv, L, D), alike in device and dtype: float32,
// float16 or bfloat16. cos and sin: (P, R / 2), (1, P, R / 2) or (B, P, R / 2) of one of those
// dtypes, R <= D. Token i of batch b is turned by row positions[b, i] of the tables, positions
// being int32 or int64, (L), (1, L) or (B, L); without positions by row i + seqlen_offset +
// seqlen_offsets[b], the latter (B) int32. Columns from R on stay. Any strides.
struct RopeArguments {
  torch::stable::Tensor q;
  std::optional<torch::stable::Tensor> k;
  torch::stable::Tensor cos;
  torch::stable::Tensor sin;
  std::optional<torch::stable::Tensor> positions;
  int64_t seqlen_offset;
  std::optional<torch::stable::Tensor> seqlen_offsets;
  bool interleaved;
  bool conjugate;  // turn back
};

// inv_freq: (N) float32. positions: (L), (B, L) or (S, B, L) of int32, int64 or float32. Any
// strides.
struct RopeTablesArguments {
  torch::stable::Tensor inv_freq;
  torch::stable::Tensor positions;
  double attention_factor;
  std::optional<torch::headeronly::ScalarType> dtype;
};

// All throw std::invalid_argument for arguments other than the above. A row that values of
// positions or seqlen_offsets put outside the tables gives NaN, and is not read.

// New tensors like q and k in dtype and in order of dimensions, the last one innermost; without k
// the second one is empty, (0).
std::tuple<torch::stable::Tensor, torch::stable::Tensor> rope(const RopeArguments& arguments,
                                                              Backend& backend);

// In place. Throws also where q and k may overlap themselves, each other or another argument.
void rope_inplace(const RopeArguments& arguments, Backend& backend);

// cos and sin of positions times inv_freq, times attention_factor: (*positions.shape, N),
// contiguous, float32 unless dtype says float16 or bfloat16.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> rope_tables(
    const RopeTablesArguments& arguments, Backend& backend);

// The same checks and choice as JSON, without running or allocating anything.
std::string rope_explain(const RopeArguments& arguments, bool in_place);
std::string rope_tables_explain(const RopeTablesArguments& arguments);

}  // namespace metal_attn
