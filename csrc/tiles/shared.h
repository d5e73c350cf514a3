// What the tiles of all kernels of attention share, decoding among them: how they are counted,
// and the defines of features.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/table.h"
#include "shaders/params.h"

namespace metal_attn {

// Four SIMD groups share one staged tile: fewer would stage each key more often, more would make
// threadgroups too big to keep two on a core.
inline constexpr int kSimdgroups = 4;

inline int fragments(int columns) { return (columns + 7) / 8; }

// That a core of M1 or M2 has room for, if a thread has 128 registers.
inline constexpr int64_t kSimdgroupsPerCore = 12;

// Whether no tile spans two blocks of a BlockMask.
inline bool within_blocks(const FlashFwdFeatures& features, int queries, int keys) {
  return features.q_block() % queries == 0 && features.kv_block() % keys == 0;
}

// Tiles of `tile` rows of a head, in `rows` of them. In a given order every block of a BlockMask,
// of `block` rows, has as many, even if the last block ends before them.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

// Columns of a slice, a multiple of `unit`.
inline int slice_columns(int columns, int slices, int unit) {
  const int units = (columns + unit - 1) / unit;
  return unit * ((units + slices - 1) / slices);
}

// What tiles and fragments of k and v hold.
template <class Specialisation>
Element kv_element(const Specialisation& s) {
  return s.features.cache.element.value_or(s.element);
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

// Columns that a lane's loads of 8 neighbours are spread over (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

// 16-byte chunks that a lane keeps of `count` fragments in threadgroup memory.
inline int kept_chunks(int count, Element element) {
  const int of_chunk = 8 / element_bytes(element);
  return (count + of_chunk - 1) / of_chunk;
}

// Columns of the two tiles that are staged as pairs.
template <class Specialisation>
int pair_columns(const Specialisation& s) {
  return padded(8 * fragments(s.head_dim_qk)) + padded(8 * fragments(s.head_dim_v));
}

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
