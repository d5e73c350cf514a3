// Tiles that were measured: what a table's rows are found by, the tables, and the lookup of a
// launch, which allocates nothing and waits for nobody.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/problem/attention.h"

extern "C" {

// A table of tiles of these rows, see TileTable, that lives as long as the process. Null
// if a row is not one.
__attribute__((visibility("default"))) const void* metal_attn_make_tiles(const char* rows);
// Launches that begin from now on look their tiles up there; null: nowhere.
__attribute__((visibility("default"))) void metal_attn_use_tiles(const void* table);

}  // extern "C"

namespace metal_attn {

// How a tile was chosen, unless a table has it.
inline constexpr const char* kEstimated = "default";

// One number of a tile, by its name in tables, and its limits (csrc/tiles/knobs.h).
template <class Tile>
struct Knob {
  const char* name;
  int Tile::* value;
  int least;
  int most;
  int step;
};

// What the choice of a tile depends on, in words: "flash_fwd half 128 128 band q<=2048 k<=2048".
// Alignment is not in it, as it must not change the bits of results, nor is what changes neither
// the work nor the registers: lengths of sequences, pages, sinks, slopes.
class TileKey {
 public:
  TileKey(const char* kernel, Element element, int head_dim_qk, int head_dim_v,
          const FlashFwdFeatures& features, int64_t queries, int64_t keys);

  std::string_view text() const { return {text_.data(), size_}; }

 private:
  void add(std::string_view letters);
  void add(int64_t number);
  void add_word(std::string_view word);
  void add_class(const char* of, int64_t length);

  std::array<char, 160> text_;
  std::size_t size_ = 0;
};

// `queries`, `keys`: the lengths of which a kernel's time depends; for decoding, the queries that
// share a KV head.
template <class Specialisation>
TileKey tile_key(const char* kernel, const Specialisation& s, int64_t queries, int64_t keys) {
  return {kernel, s.element, s.head_dim_qk, s.head_dim_v, s.features, queries, keys};
}

class TileRow {
 public:
  TileRow(std::string key, std::vector<std::pair<std::string, int>> tile, std::string source)
      : key(std::move(key)), source(std::move(source)), tile_(std::move(tile)) {}

  // Gives a specialisation this row's tile. Returns false if it has other knobs.
  template <class Specialisation>
  bool give(Specialisation& s) const {
    const auto knobs = Specialisation::knobs();
    for (const auto& knob : knobs) {
      const int* number = find(knob.name);
      if (number == nullptr) {
        return false;
      }
      s.*knob.value = *number;
    }
    return knobs.size() == tile_.size();
  }
  // Says once on stderr that the kernel cannot run this tile.
  void refuse(std::string_view wanted) const;
  // Is used no more, which is said once on stderr, as its kernel does not compile. Returns whether
  // it is dropped: a row for all launches of a kernel, with which tiles are tried, never is.
  bool drop(const std::string& why) const;
  bool dropped() const { return dropped_; }

  const std::string key;
  const std::string source;  // how it was chosen, as kEstimated is

 private:
  const int* find(std::string_view name) const;
  std::string text() const;

  const std::vector<std::pair<std::string, int>> tile_;
  mutable std::atomic<bool> refused_{false};
  mutable std::atomic<bool> dropped_{false};
};

// Never destroyed: a launch of another thread may be reading it.
class TileTable {
 public:
  // `rows`: a line each, of key, tile and source with tabs between. A key that is a kernel's name
  // alone is for all of its launches. Throws std::invalid_argument if it is not that.
  explicit TileTable(const char* rows);

  const TileRow* find(std::string_view key) const;  // null if there is none

 private:
  std::vector<std::unique_ptr<const TileRow>> rows_;  // by key
};

// What launches look tiles up in; null: nothing, and all tiles are the default ones.
const TileTable* tile_table();
void use_tile_table(const TileTable* table);

}  // namespace metal_attn
