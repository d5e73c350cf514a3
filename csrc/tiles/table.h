// The choice of a tile from the rows of csrc/tiles/table.inc and from tables that `tune` measured.
//
// A row has conditions, a tile, and its measured number of registers. A problem takes the first row
// of its kernel whose conditions hold, whose tile can run, and which the GPU has not refused
// (csrc/tiles/refused.h). The last rows are small tiles that run for every problem whose rows fit
// in threadgroup memory.
//
// The tile is then fitted to the problem: slices of wide rows, row fragments for the queries of a
// decode, and tiles within the blocks of a BlockMask. The numbers of splits of a decode's keys and
// of the query heads of dk and dv depend on the GPU's cores and are not part of a tile.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "csrc/problem/gpu.h"
#include "csrc/tiles/knobs.h"
#include "csrc/tiles/refused.h"
#include "shaders/params/common.h"

namespace metal_attn {

// How many registers, and how much work per score, features add to a kernel.
enum class RegisterPressure {
  kLight,   // at most a band, a mask, slopes, a cap or a sink
  kHeavy,   // any feature but rotary embeddings
  kRotary,  // any feature
  kNever,   // for rows that only `tune` tries
};

RegisterPressure register_pressure_of(const FlashFwdFeatures& features);

// Apple's GPU families, for the conditions of rows.
inline constexpr int kM1 = 7;
inline constexpr int kM3 = 9;

// One number of a tile: its name in tables and its limits.
template <class Tile>
struct Knob {
  const char* name;
  int Tile::* value;
  int minimum;
  int maximum;
  int step;

  bool allows(int number) const {
    return minimum <= number && number <= maximum &&
           (step > 0 ? number % step == 0 : (number & (number - 1)) == 0);
  }
};

// Defines the struct of a tile from a list of csrc/tiles/knobs.h.
#define KNOB_MEMBER(NAME, MEMBER, MIN, MAX, STEP) int MEMBER = MIN;
#define KNOB_ENTRY(NAME, MEMBER, MIN, MAX, STEP) {#NAME, &Tile::MEMBER, MIN, MAX, STEP},
#define DEFINE_TILE(TILE, KNOBS)                               \
  struct TILE {                                                \
    KNOBS(KNOB_MEMBER)                                         \
    static std::span<const Knob<TILE>> knobs() {               \
      using Tile = TILE;                                       \
      static constexpr Knob<Tile> all[] = {KNOBS(KNOB_ENTRY)}; \
      return all;                                              \
    }                                                          \
    bool operator==(const TILE&) const = default;              \
  };

inline constexpr int kAny = std::numeric_limits<int>::max();

// The values of a problem, or the limits of a row of the table.
struct TileConditions {
  int bits;                   // of an element
  int columns;                // of a row of q, k or v; the row's maximum
  int queries;                // of a decode that share a KV head; the row's maximum
  RegisterPressure pressure;  // the row's maximum
  int family;                 // the row's minimum
  double registers = 0;       // 32-bit registers of a thread of M1 (bench/agx); 0: not measured

  int whole_registers() const { return static_cast<int>(registers + 0.5); }
  // True if the row's tile suits the operands and the GPU.
  bool suits(const TileConditions& problem) const {
    return bits == problem.bits && columns >= problem.columns && family <= problem.family;
  }
  // True if the row is a default for the problem.
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

// A row of csrc/tiles/table.inc, without a condition on queries and with one.
#define TILE_ROW(BITS, COLUMNS, PRESSURE, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, kAny, RegisterPressure::k##PRESSURE, k##FAMILY, REGISTERS}, {__VA_ARGS__}},
#define DECODE_TILE_ROW(BITS, COLUMNS, QUERIES, PRESSURE, FAMILY, REGISTERS, ...) \
  {{BITS, COLUMNS, QUERIES, RegisterPressure::k##PRESSURE, k##FAMILY, REGISTERS}, {__VA_ARGS__}},

// The fields of the specialisations of all kernels of attention. A specialisation also has:
// - `table`: its rows of the table, and `cut`, which fits a row's tile to the problem.
// - `tile_queries` and `tile_keys`, which must divide the blocks of a BlockMask.
// - `threadgroup_bytes`, the exact size of the shader's arrays, and `can_run`, for other limits.
template <class Tile>
struct Tiled : Tile {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool wide_loads;   // k and v are loaded in 16-byte vectors
  bool wide_rotary;  // q or k is rotated in 16-byte vectors
  FlashFwdFeatures features;
  const TileConditions* defaults;  // of the row, if the tile is a default one
  const TileRow* row;              // of a tuned table, if the tile is from one
  bool refused;                    // the GPU has refused this tile and every tile of other rows

  Tile& tile() { return *this; }
  const Tile& tile() const { return *this; }
  // The element of tiles and fragments of k and v.
  Element kv_element() const { return features.cache.element.value_or(element); }
  // Registers of a thread, for `explain`. 0: not measured.
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

// The problem with the tile, if the kernel can run this tile.
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

// The key and the name of the tile in RefusedTiles.
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

// The tile of the first row that fits and is not refused. If all are refused, the first.
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

// The tile of the tuned table in use for this kernel or problem, or `chosen` if it has none.
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
  if (!s.row->read_tile(s.tile()) || !runs(s)) {
    s.row->warn_cannot_run(key.text());
    return chosen;
  }
  s.refused = false;
  if (!s.row->is_forced() && is_refused(s)) { return chosen; }
  s.defaults = s.tile() == chosen.tile() ? chosen.defaults : nullptr;
  return s;
}

// The tiles that `tune` measures: the chosen one, and those of other rows for such operands.
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
