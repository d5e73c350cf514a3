// The notes of chosen tiles in JSON, and the replacement of tiles that do not compile.
#pragma once

#include <cstdio>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/tiles/table.h"

namespace metal_attn {

// "tile chosen by the table row for 16-bit dtypes, head dims up to 64: at most 102 of M1's 128
// registers a thread"
inline std::string row_text(const TileConditions* row) {
  if (row == nullptr) { return "a tile of a tuned table"; }
  const int registers = row->whole_registers();
  std::string text = "tile chosen by the table row for " + std::to_string(row->bits) +
                     "-bit dtypes, head dims up to " + std::to_string(row->columns);
  text += row->queries != kAny ? ", " + Counted{row->queries, "query"}.str() : "";
  text += row->pressure == RegisterPressure::kLight ? ", light features" : "";
  text += row->family > kM1 ? ", M3 and later" : "";
  return text + (registers == 0 ? ": registers not measured"
                                : ": at most " + std::to_string(registers) +
                                      " of M1's 128 registers a thread");
}

// Joins the texts that are not empty with "; ".
inline std::string joined(std::initializer_list<std::string> reasons) {
  std::string text;
  for (const std::string& reason : reasons) {
    text += (text.empty() || reason.empty() ? "" : "; ") + reason;
  }
  return text;
}

// "default" or the source of a tuned table's row, and the tiles that the GPU has refused.
template <class Specialisation>
std::string choice_text(const Specialisation& s) {
  std::string text = s.row == nullptr ? "default" : s.row->source;
  if (const RefusedTiles* refused = refused_tiles()) {
    if (const auto entry = refused->find(refusals_key(s)); entry != refused->end()) {
      for (const RefusedTile& tile : entry->second) { text += "; refused: " + tile.name; }
    }
  }
  return text;
}

// The note of a launch: its memory, the choice of its tile, and for `tune` the key of a table's row
// and the tiles to measure, starting with the chosen one.
template <class Specialisation>
JsonObject tile_note(const Specialisation& s, int64_t queries, int64_t keys) {
  JsonObject tuning;
  tuning.add("key", std::string(key_of(s, queries, keys).text()))
      .add("candidates", tile_candidates(s, gpu()));
  return JsonObject()
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers())
      .add("choice", choice_text(s))
      .add("tuning", tuning);
}

// Thrown if the GPU refused a tile and the call must choose another one.
struct TileRefused {
  std::string why;
  std::string warning;  // a line, or "" if it was printed before
};

// Refuses the tile. Throws TileRefused, or CompileError with all reasons if it was the last tile.
template <class Specialisation>
[[noreturn]] void drop_tile(const Specialisation& s, const TileKey& key, const std::string& why) {
  const std::string refusals = refusals_key(s);
  const bool is_new = refuse_tile(refusals, refused_name(s), why);
  const std::optional<Specialisation> next = default_tile(s, gpu());
  if (!next || next->refused) { throw CompileError(no_tile_left(refusals, key.problem())); }
  std::string warning;
  if (is_new) {
    const bool tuned = s.row != nullptr;
    warning = std::string("torch_metal_attn: this GPU refuses the tile ") + tile_text(s) +
              (tuned ? ", which a tuned table has for " : ", which the default table has for ") +
              std::string(tuned ? key.text() : key.problem()) + ": the tile " + tile_text(*next) +
              " is used instead (" + first_line(why) + "). " +
              (tuned ? "`python -m torch_metal_attn tune` measures the tiles again\n"
                     : "Please report this with the output of `python -m torch_metal_attn verify "
                       "--full`\n");
  }
  throw TileRefused{why, warning};
}

// Runs a launch whose tile was chosen for these lengths. Throws TileRefused if the GPU refuses it.
template <class Specialisation>
void run_chosen(Backend& backend, const Launch& launch, const Specialisation& s, int64_t queries,
                int64_t keys) {
  try {
    backend.run(launch);
  } catch (const CompileError& error) {
    if (s.row != nullptr && s.row->is_forced()) { throw; }
    drop_tile(s, key_of(s, queries, keys), error.why);
  }
}

// The result of `run`, which chooses tiles and launches kernels. Calls it again after each refused
// tile. At the end prints the warnings about refused tiles.
template <class Run>
auto with_tiles_that_run(const Run& run) {
  constexpr int kMostTiles = 64;  // more than the kernels of a call have together
  std::string warnings;
  for (int refused = 0;; ++refused) {
    try {
      auto result = run();
      std::fwrite(warnings.data(), 1, warnings.size(), stderr);
      return result;
    } catch (const TileRefused& tile) {
      warnings += tile.warning;
      if (refused == kMostTiles) { throw CompileError(tile.why); }
    }
  }
}

}  // namespace metal_attn
