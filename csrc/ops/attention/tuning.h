// How a tile was chosen, in JSON, what `tune` measures instead of it, and what becomes of a table's
// tile that does not compile.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/ops/common/recorder.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/compile_error.h"
#include "csrc/tiles/table.h"

namespace metal_attn {

// "at most 102 registers a thread, of which M1 has 128, by the row for 16 bits, head dims up to 64"
inline std::string row_text(const TileConditions* row) {
  if (row == nullptr) {
    return "a tile of a tuned table";
  }
  const int registers = row->whole_registers();
  std::string text = registers == 0 ? "registers not measured"
                                    : "at most " + std::to_string(registers) +
                                          " registers a thread, of which M1 has 128";
  text += std::string(", by the row for ") + std::to_string(row->bits) + " bits, head dims up to " +
          std::to_string(row->columns);
  text += row->queries != kAny ? ", " + std::to_string(row->queries) + " queries" : "";
  text += row->load == Load::kLight ? ", light features" : "";
  return text + (row->family > kM1 ? ", M3 and later" : "");
}

// What is told of a launch whose tile was chosen: what it takes, how it was chosen, the key of a
// table's row, and the tiles that are worth a measurement, the chosen one first.
template <class Specialisation>
JsonObject tile_note(const Specialisation& s, int64_t queries, int64_t keys) {
  JsonObject tuning;
  tuning.add("key", std::string(key_of(s, queries, keys).text()))
      .add("candidates", tile_candidates(s, gpu()));
  return JsonObject()
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers())
      .add("choice", s.row == nullptr ? "default" : s.row->source.c_str())
      .add("tuning", tuning);
}

// What `run` returns, which chooses tiles and launches kernels. If the tile of a table's row does
// not compile, the row is dropped, and `run` chooses anew.
template <class Run>
auto without_bad_rows(const Run& run) {
  constexpr int kMostRows = 2;  // of one call: those of dq and of dk and dv
  for (int dropped = 0;; ++dropped) {
    try {
      return run();
    } catch (const CompileError& error) {
      if (dropped == kMostRows || error.tile_row == nullptr ||
          !error.tile_row->drop(first_line(error.what()))) {
        throw;
      }
    }
  }
}

}  // namespace metal_attn
