// Tiles that were measured: what a table's rows are found by, the tables, and the lookup of a
// launch, which allocates nothing and waits for nobody.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "csrc/problem/attention.h"

extern "C" {

// A table of tiles, which lives as long as the process. `rows`: a line each, of key, tile and
// source with tabs between. A key that is a kernel's name alone is for all of its launches. Null if
// a row is not that.
__attribute__((visibility("default"))) const void* metal_attn_make_tiles(const char* rows);
// Launches that begin from now on look their tiles up there; null: nowhere.
__attribute__((visibility("default"))) void metal_attn_use_tiles(const void* table);

}  // extern "C"

namespace metal_attn {

struct TileKey {
  std::array<char, 256> letters;  // more than all words together
  std::size_t length = 0;
  std::size_t without_lengths = 0;  // so many letters say what the problem is at any length

  std::string_view text() const { return {letters.data(), length}; }
  std::string_view problem() const { return {letters.data(), without_lengths}; }
};

// The words on which the choice of a tile depends: "flash_fwd half 128 128 band q<=2048 k<=2048".
// Alignment is not in it, as it must not change the bits of results, nor is what changes neither
// the work nor the registers: lengths of sequences, pages, sinks, slopes. `queries`, `keys`: the
// lengths on which a kernel's time depends; for decoding, the queries that share a KV head.
TileKey tile_key(const char* kernel, Element element, int head_dim_qk, int head_dim_v,
                 const FlashFwdFeatures& features, int64_t queries, int64_t keys);

// Reads "NAME=12" and the blank behind it off the text. Returns false if it does not begin so.
bool read_knob(std::string_view& text, std::string_view name, int& value);

class TileRow {
 public:
  TileRow(std::string key, std::string tile, std::string source)
      : source(std::move(source)), key_(std::move(key)), tile_(std::move(tile)) {}

  // Reads the row's tile. Returns false if it has other knobs.
  template <class Tile>
  bool give(Tile& tile) const {
    std::string_view rest = tile_;
    for (const auto& knob : Tile::knobs()) {
      if (!read_knob(rest, knob.name, tile.*knob.value)) { return false; }
    }
    return rest.empty();
  }
  // Says once on stderr that the kernel cannot run this tile.
  void refuse(std::string_view wanted) const;
  // True if it is for all launches of a kernel, as where tiles are tried: then it is never dropped.
  bool tries() const { return key_.find(' ') == std::string::npos; }

  const std::string source;  // how it was chosen

 private:
  const std::string key_;
  const std::string tile_;
  mutable std::atomic<bool> refused_{false};
};

// By key. Never destroyed: a launch of another thread may be reading it.
using TileTable = std::map<std::string, TileRow, std::less<>>;

// The table in which launches look tiles up; null: all tiles are the default ones.
const TileTable* tile_table();

}  // namespace metal_attn
