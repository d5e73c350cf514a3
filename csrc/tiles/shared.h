// What the choosers of all kernels of attention share, decoding among them: how tiles are counted,
// and the defines of features.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/tuned.h"
#include "shaders/params.h"

namespace metal_attn {

// Four SIMD groups share one staged tile: fewer would stage each key more often, more would make
// threadgroups too big to keep two on a core.
inline constexpr int kSimdgroups = 4;

inline int fragments(int columns) { return (columns + 7) / 8; }

// A thread holds two of a fragment's 64 elements.
inline int fragment_registers(int bytes) { return 2 * bytes / 4; }

// That a core of M1 or M2 has room for, if a thread has 128 registers.
inline constexpr int64_t kSimdgroupsPerCore = 12;

// SIMD groups of a threadgroup whose rows, 8 each, divide a BlockMask's block; 0: there is none.
inline int simdgroups_for(int block) {
  int simdgroups = kSimdgroups;
  while (block % (8 * simdgroups) != 0) {
    --simdgroups;
  }
  return simdgroups;
}

// Whether no tile spans two blocks of a BlockMask.
inline bool within_blocks(const FlashFwdFeatures& features, int queries, int keys) {
  return features.q_block() % queries == 0 && features.kv_block() % keys == 0;
}

// Tiles of `tile` rows of a head, in `rows` of them. In a given order every block of a BlockMask,
// of `block` rows, has as many, even if the last block ends before them.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

// Of so few columns it was never faster that two SIMD groups share rows.
inline constexpr int kFewColumns = 64;

// Columns of a slice, a multiple of 8.
inline int slice_columns(int columns, int slices) {
  return 8 * ((fragments(columns) + slices - 1) / slices);
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
  s.row = nullptr;
  return s;
}

template <class Specialisation>
bool fits(const Specialisation& s, const Gpu& gpu) {
  ++t_tiles_tried;
  return s.registers() <= register_limit(gpu) && s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

// "111 of 120 registers a thread".
template <class Specialisation>
std::string register_text(const Specialisation& s, const Gpu& gpu) {
  return std::to_string(s.registers()) + " of " + std::to_string(register_limit(gpu)) +
         " registers a thread";
}

// Loads of a fragment of rows that are read again. Alignment, which may double them, must not
// change the tile: it would change the bits of results.
template <class Specialisation>
int row_loads(const Specialisation& s) {
  // A rotated element is made of two, a cosine and a sine.
  return s.features.rotary ? 8 : 1;
}

// Registers of the two operands whose rows a gradient's kernel owns.
template <class Specialisation>
int held_registers(const Specialisation& s) {
  const int count = s.row_fragments * (fragments(s.head_dim_qk) + fragments(s.head_dim_v));
  return s.rows_in_registers ? count * fragment_registers(element_bytes(s.element)) : 0;
}

template <class Specialisation>
int second_chains(const Specialisation& s) {
  return s.head_dim_qk > CHAIN_COLUMNS || s.head_dim_v > CHAIN_COLUMNS ? 1 : 0;
}

// Columns that a lane's loads of 8 neighbours are spread over (shaders/spans.h).
inline constexpr int kSpanColumns = 32;

// What staging the rows of a block costs: a thread's loads and stores for 8 own rows and 32 others.
// fragments: of all tiles' rows.
inline double staging_cost(int fragments, int bytes, int own_rows) {
  constexpr int kLoads = 4;  // a chunk of 16 bytes is loaded from device memory, and stored
  return double(kLoads * 32 * 8 * fragments * bytes) / (16 * 32) * 8 / own_rows;
}

// 16-byte chunks that a lane keeps of `count` fragments in threadgroup memory.
inline int kept_chunks(int count, Element element) {
  const int of_chunk = 8 / element_bytes(element);
  return (count + of_chunk - 1) / of_chunk;
}

// How much longer a grid of so many SIMD groups takes because it leaves cores idle. banded: some
// tiles are shorter, which only later tiles make up for. 0: of a problem too small to matter.
double idle_factor(double simdgroups, bool banded, const Gpu& gpu);

// Columns of the two tiles that are staged as pairs.
template <class Specialisation>
int pair_columns(const Specialisation& s) {
  return padded(8 * fragments(s.head_dim_qk)) + padded(8 * fragments(s.head_dim_v));
}

// What features hold beside tiles.
int feature_registers(const FlashFwdFeatures& features);

void append_features(Defines& defines, const FlashFwdFeatures& features, bool wide_rotary);

// The defines that every kernel of attention has, its own, and those of the features.
template <class Specialisation>
Defines all_defines(const Specialisation& s, const Defines& own, bool wide_rotary) {
  Defines defines{
      {"ELEMENT", element_name(s.element)}, {"HEAD_DIM_QK", s.head_dim_qk},
      {"HEAD_DIM_V", s.head_dim_v},         {"ROW_FRAGMENTS", s.row_fragments},
      {"WIDE_LOADS", s.wide_loads},
  };
  defines.append(own.begin(), own.end());
  append_features(defines, s.features, wide_rotary);
  return defines;
}

}  // namespace metal_attn
