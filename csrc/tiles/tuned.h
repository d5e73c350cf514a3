// Tiles that were measured: what a table's rows are found by, the tables, and the lookup of a
// launch, which allocates nothing and waits for nobody.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/runtime/fixed_vector.h"

extern "C" {

// A table of tiles of these rows, see TileTable, that lives as long as the process. Null
// if a row is not one.
__attribute__((visibility("default"))) const void* metal_attn_make_tiles(const char* rows);
// Launches that begin from now on look their tiles up there; null: nowhere.
__attribute__((visibility("default"))) void metal_attn_use_tiles(const void* table);
// Tiles that the choosers have tried in this thread: a call like an earlier one tries none.
__attribute__((visibility("default"))) uint64_t metal_attn_tiles_tried();

}  // extern "C"

namespace metal_attn {

// How a tile was chosen, unless a table has it.
inline constexpr const char* kEstimated = "default";

// What of a specialisation is chosen, by name. Whatever else it has follows from the problem.
struct TileValue {
  const char* name;
  int value;
};
using Tile = FixedVector<TileValue, 8>;

// "BLOCK_K=16 ROW_FRAGMENTS=2"
std::string tile_text(const Tile& tile);

// Told of every tile that a kernel can run for a problem, and what it costs, until it returns true.
template <class Specialisation>
using TileVisitor = std::function<bool(const Specialisation&, double cost)>;

// The cost of a tile that some other tile equals or beats in every respect.
inline constexpr double kHopeless = std::numeric_limits<double>::infinity();

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

  bool is(const Tile& tile) const;
  // Says once on stderr that the kernel cannot run this tile.
  void refuse(std::string_view wanted) const;
  // Is used no more, which is said once on stderr, as its kernel does not compile. Returns whether
  // it is dropped: a row for all launches of a kernel, with which tiles are tried, never is.
  bool drop(const std::string& why) const;
  bool dropped() const { return dropped_; }

  const std::string key;
  const std::string source;  // how it was chosen, as kEstimated is

 private:
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

// What launches look tiles up in; null: nothing, and all tiles are estimated.
const TileTable* tile_table();
void use_tile_table(const TileTable* table);

// How often a table that is in use has changed: what was found in it before may be another now.
uint64_t tile_table_changes();
void tile_table_has_changed();

// The class of lengths that a table tells apart which this one is in.
int length_class(int64_t length);

// Tiles of which the choosers asked whether they fit, in this thread.
inline thread_local uint64_t t_tiles_tried = 0;

// The tile that the table in use has for this problem, or else the estimated one.
template <class Specialisation>
Specialisation tuned(const Specialisation& estimated, const char* kernel, int64_t queries,
                     int64_t keys) {
  const TileTable* table = tile_table();
  if (table == nullptr) {
    return estimated;
  }
  const TileKey key = tile_key(kernel, estimated, queries, keys);
  const TileRow* row = table->find(kernel);
  row = row != nullptr ? row : table->find(key.text());
  if (row == nullptr || row->dropped()) {
    return estimated;
  }
  struct Search {
    const TileRow& row;
    Specialisation found;
    bool done;
  } search{*row, estimated, row->is(estimated.tile())};
  if (!search.done) {
    for_each_tile(estimated, [&search](const Specialisation& one, double) {
      search.done = search.row.is(one.tile());
      search.found = search.done ? one : search.found;
      return search.done;
    });
  }
  if (!search.done) {
    row->refuse(key.text());
    return estimated;
  }
  search.found.row = row;
  return search.found;
}

// What is worth a measurement: the estimated tile, then others from the cheapest on. A register
// count is an estimate and a spill is sometimes cheap, so a few more than the limit are let in.
inline constexpr std::size_t kMostCandidates = 8;
inline constexpr int kMoreRegisters = 48;

template <class Specialisation>
std::vector<std::string> tile_candidates(const Specialisation& estimated, const Gpu& gpu) {
  const int most = std::max(register_limit(gpu), estimated.registers()) + kMoreRegisters;
  struct Other {
    double cost;
    std::size_t number;  // of equals the first comes first
    Tile tile;
  };
  std::vector<Other> others;
  for_each_tile(estimated, [&](const Specialisation& one, double cost) {
    if (one.registers() <= most && cost < kHopeless) {
      others.push_back({cost, others.size(), one.tile()});
    }
    return false;
  });
  std::sort(others.begin(), others.end(), [](const Other& a, const Other& b) {
    return std::pair(a.cost, a.number) < std::pair(b.cost, b.number);
  });
  std::vector<std::string> found{tile_text(estimated.tile())};
  for (std::size_t i = 0; i < others.size() && found.size() < kMostCandidates; ++i) {
    const std::string text = tile_text(others[i].tile);
    if (std::find(found.begin(), found.end(), text) == found.end()) {
      found.push_back(text);
    }
  }
  return found;
}

}  // namespace metal_attn
