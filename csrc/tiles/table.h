// How a tile is chosen: by the rows of csrc/tiles/table.inc, and by tables that `tune` measured.
//
// A row has conditions, a tile, and the registers that it was measured with. A problem takes the
// first row of its kernel whose conditions hold and whose tile the kernel can run for it, and the
// GPU has not refused (csrc/tiles/refused.h). The last rows are small tiles that every problem can
// run that has enough threadgroup memory.
//
// A row's tile is then fitted to the problem: slices of wide rows, no more row fragments than a
// decode has queries for, and tiles within the blocks of a BlockMask. The number of splits, of a
// decode's keys or of the query heads of dk and dv, depends on the GPU's cores and is no part of a
// tile.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "csrc/problem/gpu.h"
#include "csrc/tiles/knobs.h"
#include "csrc/tiles/refused.h"
#include "shaders/params/common.h"

namespace metal_attn {

// The registers, and the work of each score, that features add to a kernel.
enum class RegisterPressure {
  kLight,   // at most a band, a mask, slopes, a cap or a sink
  kHeavy,   // anything but rotary embeddings
  kRotary,  // anything
  kNever,   // of a row that only `tune` tries
};

RegisterPressure register_pressure_of(const FlashFwdFeatures& features);

// The first of Apple's families that a row is for.
inline constexpr int kM1 = 7;
inline constexpr int kM3 = 9;

// One number of a tile, by its name in tables, and its limits.
template <class Tile>
struct Knob {
  const char* name;
  int Tile::* value;
  int least;
  int most;
  int step;

  bool allows(int number) const {
    return least <= number && number <= most &&
           (step > 0 ? number % step == 0 : (number & (number - 1)) == 0);
  }
};

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

inline constexpr int kAny = std::numeric_limits<int>::max();

// For which problems a row is, or what a problem has.
struct TileConditions {
  int bits;                   // of an element
  int columns;                // of a row of q, k or v; of a row of the table: at most
  int queries;                // of a decode that share a KV head, likewise
  RegisterPressure pressure;  // likewise
  int family;                 // at least
  double registers = 0;       // of a row: that a thread of M1 needs, of 32 bits (bench/agx), or 0

  int whole_registers() const { return static_cast<int>(registers + 0.5); }
  // True if a row's tile is for such operands on this GPU, and for this problem.
  bool suits(const TileConditions& problem) const {
    return bits == problem.bits && columns >= problem.columns && family <= problem.family;
  }
  bool holds(const TileConditions& problem) const {
    return suits(problem) && queries >= problem.queries && pressure >= problem.pressure &&
           pressure != RegisterPressure::kNever;
  }
};

template <class Tile>
struct DefaultRow {
  TileConditions conditions;
  Tile tile;
};

// A row of csrc/tiles/table.inc. Of a kernel without a condition on queries:
#define TILE_ROW(BITS, COLUMNS, LOAD, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, kAny, RegisterPressure::k##LOAD, k##FAMILY, REGISTERS}, {__VA_ARGS__}},
#define DECODE_TILE_ROW(BITS, COLUMNS, QUERIES, LOAD, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, QUERIES, RegisterPressure::k##LOAD, k##FAMILY, REGISTERS}, {__VA_ARGS__}},

// The fields of the specialisations of all kernels of attention. Each also has its rows, `table`;
// `cut`, which fits a row's tile to the problem; and what the kernel can run: `tile_queries` and
// `tile_keys`, which no block of a BlockMask may divide, `threadgroup_bytes`, exactly those that
// the shader's arrays take, and `can_run` for the rest.
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
  bool refused;                    // the GPU has refused this tile, and all that could replace it

  OwnTile& tile() { return *this; }
  const OwnTile& tile() const { return *this; }
  // The element of tiles and fragments of k and v.
  Element kv_element() const { return features.cache.element.value_or(element); }
  // Registers of a thread, for `explain`: 0 if nobody has measured the tile.
  int registers() const { return defaults == nullptr ? 0 : defaults->whole_registers(); }
  TileConditions conditions(int family) const {
    return {8 * element_bytes(element), std::max(head_dim_qk, head_dim_v), 0,
            register_pressure_of(features), family};
  }
};

template <class Specialisation>
bool runs(const Specialisation& s) {
  const auto knobs = Specialisation::knobs();
  return std::all_of(knobs.begin(), knobs.end(),
                     [&](const auto& knob) { return knob.allows(s.*knob.value); }) &&
         s.features.q_block() % s.tile_queries() == 0 &&
         s.features.kv_block() % s.tile_keys() == 0 && s.can_run() &&
         s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

// The problem with a row's tile, if the kernel can run it.
template <class Specialisation, class Tile>
std::optional<Specialisation> with_tile(Specialisation s, const Tile& tile) {
  s.tile() = tile;
  s.cut();
  return runs(s) ? std::optional(s) : std::nullopt;
}

template <class Specialisation>
std::string tile_text(const Specialisation& s) {
  std::string text;
  for (const auto& knob : Specialisation::knobs()) {
    text += (text.empty() ? "" : " ") + (knob.name + ("=" + std::to_string(s.*knob.value)));
  }
  return text;
}

template <class Specialisation>
TileKey key_of(const Specialisation& s, int64_t queries, int64_t keys) {
  return tile_key(s.kernel(), s.element, s.head_dim_qk, s.head_dim_v, s.features, queries, keys);
}

// By what the tiles are found that a GPU has refused, and this one among them.
template <class Specialisation>
std::string refusals_key(const Specialisation& s) {
  return refusals_key(key_of(s, 0, 0), s.features);
}
template <class Specialisation>
std::string refused_name(const Specialisation& s) {
  return tile_text(s) + " in threadgroups of " + std::to_string(s.threads());
}

template <class Specialisation>
bool is_refused(const Specialisation& s) {
  return refused_tiles() != nullptr && is_refused(refusals_key(s), refused_name(s));
}

// The first row's tile again, marked as refused, if all of them are.
template <class Specialisation>
std::optional<Specialisation> default_tile(const Specialisation& problem, const Gpu& gpu) {
  const TileConditions conditions = problem.conditions(gpu.family);
  std::optional<Specialisation> first;
  for (const auto& row : problem.table()) {
    if (row.conditions.holds(conditions)) {
      if (auto candidate = with_tile(problem, row.tile)) {
        candidate->defaults = &row.conditions;
        candidate->refused = is_refused(*candidate);
        if (!candidate->refused) { return candidate; }
        first = first ? first : candidate;
      }
    }
  }
  return first;
}

// The tile that the tuned table in use has for this kernel, or for this problem, or else the
// default one.
template <class Specialisation>
Specialisation tuned(const Specialisation& chosen, int64_t queries, int64_t keys) {
  const TileTable* table = tile_table();
  if (table == nullptr) { return chosen; }
  const TileKey key = key_of(chosen, queries, keys);
  auto entry = table->find(std::string_view(chosen.kernel()));
  entry = entry != table->end() ? entry : table->find(key.text());
  if (entry == table->end()) { return chosen; }
  Specialisation s = chosen;
  s.row = &entry->second;
  if (!s.row->give(s.tile()) || !runs(s)) {
    s.row->refuse(key.text());
    return chosen;
  }
  s.refused = false;
  if (!s.row->tries() && is_refused(s)) { return chosen; }
  s.defaults = s.tile() == chosen.tile() ? chosen.defaults : nullptr;
  return s;
}

// The tiles worth a measurement: the chosen one, and those of other rows for such operands. They
// differ in kind: fewer keys a block, rows that are held or read again, shared columns.
inline constexpr std::size_t kMostCandidates = 8;

template <class Specialisation>
std::vector<std::string> tile_candidates(const Specialisation& chosen, const Gpu& gpu) {
  std::vector<std::string> texts{tile_text(chosen)};
  const TileConditions conditions = chosen.conditions(gpu.family);
  for (const auto& row : chosen.table()) {
    if (texts.size() == kMostCandidates || !row.conditions.suits(conditions)) { continue; }
    if (const auto other = with_tile(chosen, row.tile)) {
      const std::string text = tile_text(*other);
      if (std::find(texts.begin(), texts.end(), text) == texts.end()) { texts.push_back(text); }
    }
  }
  return texts;
}

}  // namespace metal_attn
