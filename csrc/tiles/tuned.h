// Tables of measured tiles: their keys, their rows, and the lookup of a launch, which allocates
// nothing and takes no lock.
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

// Makes a table of tiles, which is never freed. rows: lines of key, tile and source, separated by
// tabs. A key that is only a kernel's name applies to all its launches. Null: a line is malformed.
__attribute__((visibility("default"))) const void* metal_attn_make_tiles(const char* rows);
// Sets the table for later launches. Null: no table.
__attribute__((visibility("default"))) void metal_attn_use_tiles(const void* table);

}  // extern "C"

namespace metal_attn {

struct TileKey {
  std::array<char, 256> letters;  // longer than all words together
  std::size_t length = 0;
  std::size_t without_lengths = 0;  // the length of the part that does not depend on lengths

  std::string_view text() const { return {letters.data(), length}; }
  std::string_view problem() const { return {letters.data(), without_lengths}; }
};

// The words that the choice of a tile depends on: "flash_fwd half 128 128 band q<=2048 k<=2048".
// The key has no alignment, which must not change the bits of results. It also has no features that
// change neither work nor registers: lengths of sequences, pages, sinks, slopes. queries, keys: the
// lengths that a kernel's time depends on. For decoding, the queries that share a KV head.
TileKey tile_key(const char* kernel, Element element, int head_dim_qk, int head_dim_v,
                 const FlashFwdFeatures& features, int64_t queries, int64_t keys);

// Removes "NAME=12" and a blank from the text. Returns false if the text begins otherwise.
bool read_knob(std::string_view& text, std::string_view name, int& value);

class TileRow {
 public:
  TileRow(std::string key, std::string tile, std::string source)
      : source(std::move(source)), key_(std::move(key)), tile_(std::move(tile)) {}

  // Returns false if the row's tile has other knobs.
  template <class Tile>
  bool read_tile(Tile& tile) const {
    std::string_view rest = tile_;
    for (const auto& knob : Tile::knobs()) {
      if (!read_knob(rest, knob.name, tile.*knob.value)) { return false; }
    }
    return rest.empty();
  }
  // Prints once on stderr that the kernel cannot run this tile.
  void warn_cannot_run(std::string_view wanted) const;
  // True if the row applies to all launches of a kernel, as in `tune`. Such a tile is not replaced.
  bool is_forced() const { return key_.find(' ') == std::string::npos; }

  const std::string source;  // how the tile was chosen

 private:
  const std::string key_;
  const std::string tile_;
  mutable std::atomic<bool> warned_{false};
};

// By key. Tables are never destroyed: another thread may be reading one.
using TileTable = std::map<std::string, TileRow, std::less<>>;

// The table in use, or null.
const TileTable* tile_table();

}  // namespace metal_attn
