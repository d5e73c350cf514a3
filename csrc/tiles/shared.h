// What the tiles of all kernels of attention share, decoding among them: how they are counted,
// and the defines of features.
#pragma once

#include <cstdint>

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/table.h"
#include "shaders/params.h"

namespace metal_attn {

inline int fragments(int columns) { return (columns + 7) / 8; }

// That a core of M1 or M2 has room for, if a thread has 128 registers.
inline constexpr int64_t kSimdgroupsPerCore = 12;

// Tiles of `tile` rows of a head, in `rows` of them. In a given order every block of a BlockMask,
// of `block` rows, has as many, even if the last block ends before them.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

// Columns of each of so many slices, a multiple of `unit`.
inline int slice_columns(int columns, int slices, int unit) {
  const int units = (columns + unit - 1) / unit;
  return unit * ((units + slices - 1) / slices);
}

// The most parts, up to `most`, of which each of `rows` divides a BlockMask's block; 0: there is no
// such number. Any rows divide a block of 0, as there is without a BlockMask.
inline int parts_within(int block, int rows, int most) {
  while (most > 0 && block % (rows * most) != 0) {
    --most;
  }
  return most;
}

bool wide_loads(const FlashFwdProblem& problem);
bool wide_rotary(const FlashFwdProblem& problem);

// What every kernel of attention takes from a problem as it is.
template <class Specialisation>
Specialisation specialisation_for(const FlashFwdProblem& problem) {
  Specialisation s{};
  s.element = problem.element;
  s.head_dim_qk = problem.head_dim_qk;
  s.head_dim_v = problem.head_dim_v;
  s.wide_loads = wide_loads(problem);
  s.features = problem.features;
  return s;
}

// Of tensor tiles, rows of a SIMD group, and columns of one product's result: also the keys of a
// forward's block.
inline constexpr int kTensorRows = 16;
inline constexpr int kTensorSpan = 32;

// Why a forward has 8x8 tiles only, or null.
inline const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  const FlashFwdFeatures& f = problem.features;
  return f.q_block() % kTensorRows == 0 && f.kv_block() % kTensorSpan == 0
             ? nullptr
             : "a tensor tile of 16 queries and 32 keys would span two blocks of the BlockMask";
}

// Why gradients have 8x8 tiles only, or null.
inline const char* no_tensor_gradients(const FlashFwdProblem& problem) {
  const FlashFwdFeatures& features = problem.features;
  if (features.flex) {
    return "gradients through score_mod, mask_mod and block lists have 8x8 tiles only";
  }
  // Those gradients have kernels of their own, whose products are not rounded. delta must be that
  // of the same products.
  if (problem.element == Element::kFloat && (features.bias || features.alibi)) {
    return "float32's gradients with attn_bias or alibi_slopes have 8x8 tiles only";
  }
  return no_tensor_tiles(problem);
}

// Columns that a lane's loads of 8 neighbours are spread over (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

void append_features(Defines& defines, const FlashFwdFeatures& features, bool wide_rotary);

// The defines that every kernel of attention has, its own, and those of the features.
template <class Specialisation>
Defines all_defines(const Specialisation& s, const Defines& own) {
  Defines defines{
      {"ELEMENT", element_name(s.element)}, {"HEAD_DIM_QK", s.head_dim_qk},
      {"HEAD_DIM_V", s.head_dim_v},         {"ROW_FRAGMENTS", s.row_fragments},
      {"WIDE_LOADS", s.wide_loads},
  };
  defines.append(own.begin(), own.end());
  append_features(defines, s.features, s.wide_rotary);
  return defines;
}

}  // namespace metal_attn
