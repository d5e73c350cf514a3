// The arguments of the ops of rope, and the problem that remains after the checks.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/problem/element.h"
#include "csrc/problem/tensor.h"

namespace metal_attn {

// True if the partners of the columns of each rotated 16-byte chunk lie in one chunk.
constexpr bool rotates_by_chunks(Element element, int first, int rotary_dim, bool interleaved) {
  const int chunk = 16 / element_bytes(element);
  return first % chunk == 0 && rotary_dim % (interleaved ? chunk : 2 * chunk) == 0;
}

// q: (B, Hq, L, D) and the optional k: (B, Hkv, L, D) have one device and one dtype: float32,
// float16 or bfloat16. cos and sin: (P, R / 2), (1, P, R / 2) or (B, P, R / 2) of one of those
// dtypes, R <= D. positions: int32 or int64, (L), (1, L) or (B, L). seqlen_offsets: (B) int32. All
// have any strides. Token i of batch b is rotated by row positions[b, i] of the tables, or without
// positions by row i + seqlen_offset + seqlen_offsets[b]. Columns from R on are not rotated.
struct RopeArguments {
  Tensor q;
  OptionalTensor k;
  Tensor cos;
  Tensor sin;
  OptionalTensor positions;
  int64_t seqlen_offset;
  OptionalTensor seqlen_offsets;
  bool interleaved;
  bool conjugate;  // rotate in the opposite direction
};

struct RopeProblem {
  Element element;
  Element table_element;
  const char* row_element;  // null: there are neither positions nor seqlen_offsets
  bool rows_are_positions;
  int32_t batch;
  int32_t q_heads;
  int32_t heads;
  int32_t length;
  int32_t head_dim;
  int32_t table_rows;
  int32_t pairs;
  bool interleaved;
  bool in_place;

  // In place, a launch without rotated columns has nothing to do.
  bool launches() const { return batch > 0 && heads > 0 && length > 0 && (pairs > 0 || !in_place); }
};

// inv_freq: (N) float32. positions: (L), (B, L) or (S, B, L), int32, int64 or float32. Any strides.
struct RopeTablesArguments {
  Tensor inv_freq;
  Tensor positions;
  double attention_factor;
  std::optional<ScalarType> dtype;
};

struct RopeTablesProblem {
  ScalarType dtype;
  Element element;
  const char* position_element;
  std::array<int64_t, 3> sizes;  // sections, batch, length
  int32_t columns;

  bool launches() const { return columns > 0 && sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0; }
};

}  // namespace metal_attn
