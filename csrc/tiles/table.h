// How a tile is chosen: by the rows of csrc/tiles/table.inc, and by tables that `tune` measured.
//
// A row has conditions, a tile, and the registers that it was measured with. A problem takes the
// first row of its kernel whose conditions hold and whose tile the kernel can run for it. The last
// rows are small tiles that every problem can run that has enough threadgroup memory.
//
// What rows cannot know is settled when one is taken: slices of wide rows, no more row fragments
// than a decode has queries for, and tiles within the blocks of a BlockMask. The number of splits,
// of a decode's keys or of the query heads of dk and dv, depends on the GPU's cores and is no part
// of a tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/tiles/knobs.h"
#include "csrc/tiles/tuned.h"

namespace metal_attn {

// What features add to a kernel, in registers and in the work of each score.
enum class Load {
  kLight,   // at most a band, a mask, slopes, a cap or a sink
  kHeavy,   // anything but rotary embeddings
  kRotary,  // anything
  kNever,   // of a row that only `tune` tries
};

Load load_of(const FlashFwdFeatures& features);

// The first of Apple's families that a row is for.
inline constexpr int kM1 = 7;
inline constexpr int kM3 = 9;

// A tile of the knobs that csrc/tiles/knobs.h lists.
#define KNOB_MEMBER(NAME, MEMBER, LEAST, MOST, STEP) int MEMBER = LEAST;
#define KNOB_ENTRY(NAME, MEMBER, LEAST, MOST, STEP) {#NAME, &Tile::MEMBER, LEAST, MOST, STEP},
#define DEFINE_TILE(TILE, KNOBS)                                 \
  struct TILE {                                                  \
    KNOBS(KNOB_MEMBER)                                           \
    static std::span<const Knob<TILE>> knobs() {                 \
      using Tile = TILE;                                         \
      static constexpr Knob<Tile> every[] = {KNOBS(KNOB_ENTRY)}; \
      return every;                                              \
    }                                                            \
    bool operator==(const TILE&) const = default;                \
  };

// A row of csrc/tiles/table.inc. Of a kernel without a condition on queries:
#define TILE_ROW(BITS, COLUMNS, LOAD, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, kAny, Load::k##LOAD, k##FAMILY, REGISTERS}, {__VA_ARGS__}},
#define DECODE_TILE_ROW(BITS, COLUMNS, QUERIES, LOAD, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, QUERIES, Load::k##LOAD, k##FAMILY, REGISTERS}, {__VA_ARGS__}},

inline constexpr int kAny = std::numeric_limits<int>::max();

// For which problems a row is.
struct TileConditions {
  int bits;          // of an element
  int columns;       // of a row of q, k or v, at most; v may be cut into slices
  int queries;       // of a decode that share a KV head, at most
  Load load;         // at most
  int family;        // at least
  double registers;  // that a thread of M1 needs, of 32 bits (bench/agx)
};

// Registers of a thread for `explain`: 0 if nobody has measured the tile.
inline int recorded_registers(const TileConditions* row) {
  return row == nullptr ? 0 : static_cast<int>(row->registers + 0.5);
}

template <class Tile>
struct DefaultRow {
  TileConditions conditions;
  Tile tile;
};

// A problem, as the conditions see it.
struct TileQuestion {
  int bits;
  int columns;
  int64_t queries;
  Load load;
  int family;

  bool meets(const TileConditions& row) const {
    return could_meet(row) && queries <= row.queries && load <= row.load &&
           row.load != Load::kNever;
  }
  // Whether the row's tile is for such operands on this GPU.
  bool could_meet(const TileConditions& row) const {
    return bits == row.bits && columns <= row.columns && family >= row.family;
  }
};

// What the specialisations of all kernels of attention have.
template <class OwnTile>
struct Tiled : OwnTile {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool wide_loads;   // as many columns of k and v at a time as make 16 bytes
  bool wide_rotary;  // and while they are rotated
  FlashFwdFeatures features;
  const TileConditions* defaults;  // of the default tile that this is, or null
  const TileRow* row;              // of a tuned table that has the tile, or null

  OwnTile& tile() { return *this; }
  const OwnTile& tile() const { return *this; }
  int registers() const { return recorded_registers(defaults); }
  TileQuestion question(int family) const {
    return {8 * element_bytes(element), std::max(head_dim_qk, head_dim_v), 0, load_of(features),
            family};
  }
};

// The most parts, up to `most`, of which each of `rows` divides a BlockMask's block; 0: there is no
// such number. Any rows divide a block of 0, as there is without a BlockMask.
inline int parts_within(int block, int rows, int most) {
  while (most > 0 && block % (rows * most) != 0) {
    --most;
  }
  return most;
}

// The tile of the first row that the problem meets and can run.
template <class Specialisation>
std::optional<Specialisation> default_tile(const Specialisation& problem, const Gpu& gpu) {
  const TileQuestion question = problem.question(gpu.family);
  for (const auto& row : problem.table()) {
    if (!question.meets(row.conditions)) {
      continue;
    }
    Specialisation s = problem;
    if (s.take(row.tile)) {
      s.defaults = &row.conditions;
      return s;
    }
  }
  return std::nullopt;
}

// "at most 102 registers a thread, of which M1 has 128, by the row for 16 bits, head dims up to 64"
std::string row_text(const TileConditions* row);

template <class Specialisation>
std::string tile_text(const Specialisation& s) {
  std::string text;
  for (const auto& knob : Specialisation::knobs()) {
    text +=
        (text.empty() ? "" : " ") + std::string(knob.name) + "=" + std::to_string(s.*knob.value);
  }
  return text;
}

// Whether each knob is within its limits.
template <class Specialisation>
bool within_limits(const Specialisation& s) {
  const auto knobs = Specialisation::knobs();
  return std::all_of(knobs.begin(), knobs.end(), [&](const auto& knob) {
    const int value = s.*knob.value;
    return knob.least <= value && value <= knob.most && value % knob.step == 0;
  });
}

// The tile that the tuned table in use has for this problem, or else the default one.
template <class Specialisation>
Specialisation tuned(const Specialisation& chosen, int64_t queries, int64_t keys) {
  const TileTable* table = tile_table();
  if (table == nullptr) {
    return chosen;
  }
  const TileKey key = tile_key(chosen.kernel(), chosen, queries, keys);
  const TileRow* row = table->find(chosen.kernel());
  row = row != nullptr ? row : table->find(key.text());
  if (row == nullptr || row->dropped()) {
    return chosen;
  }
  Specialisation found = chosen;
  if (!row->give(found) || !found.can_run()) {
    row->refuse(key.text());
    return chosen;
  }
  found.row = row;
  found.defaults = found.tile() == chosen.tile() ? chosen.defaults : nullptr;
  return found;
}

// What is worth a measurement: the chosen tile, and those of other rows for such operands. They
// differ in kind: fewer keys a block, rows that are held or read again, shared columns.
inline constexpr std::size_t kMostCandidates = 8;

template <class Specialisation>
std::vector<std::string> tile_candidates(const Specialisation& chosen, const Gpu& gpu) {
  std::vector<std::string> found{tile_text(chosen)};
  const TileQuestion question = chosen.question(gpu.family);
  for (const auto& row : chosen.table()) {
    if (found.size() == kMostCandidates || !question.could_meet(row.conditions)) {
      continue;
    }
    Specialisation other = chosen;
    if (other.take(row.tile)) {
      const std::string text = tile_text(other);
      if (std::find(found.begin(), found.end(), text) == found.end()) {
        found.push_back(text);
      }
    }
  }
  return found;
}

}  // namespace metal_attn
