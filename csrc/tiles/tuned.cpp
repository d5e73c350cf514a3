#include "csrc/tiles/tuned.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <system_error>

namespace {

std::atomic<const metal_attn::TileTable*> g_table{nullptr};

// Removes everything up to and including `end` from `text`. Returns the removed text without `end`.
std::string_view take_until(std::string_view& text, char end) {
  const std::string_view part = text.substr(0, text.find(end));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

}  // namespace

const void* metal_attn_make_tiles(const char* rows) {
  auto table = std::make_unique<metal_attn::TileTable>();
  for (std::string_view rest = rows; !rest.empty();) {
    std::string_view line = take_until(rest, '\n');
    if (std::count(line.begin(), line.end(), '\t') != 2) { return nullptr; }
    const std::string key(take_until(line, '\t'));
    const std::string tile(take_until(line, '\t'));
    table->try_emplace(key, key, tile, std::string(line));
  }
  return table.release();
}

void metal_attn_use_tiles(const void* table) {
  g_table = static_cast<const metal_attn::TileTable*>(table);
}

#define FLAG_WORD(NAME, DEFINE, KEY) KEY(NAME)
#define IN_KEY(NAME) {#NAME, f.NAME},
#define NO_KEY(NAME)

namespace metal_attn {
namespace {

// A length belongs to the class of the first limit that it does not exceed. The limits up to 32
// distinguish the rows of decoding.
constexpr std::array<int, 6> kClasses{8, 16, 32, 512, 2048, 8192};

}  // namespace

TileKey tile_key(const char* kernel, Element element, int head_dim_qk, int head_dim_v,
                 const FlashFwdFeatures& f, int64_t queries, int64_t keys) {
  TileKey key;
  const auto add = [&key](const char* format, auto... values) {
    key.length += std::snprintf(key.letters.data() + key.length, key.letters.size() - key.length,
                                format, values...);
  };
  add("%s %s %d %d", kernel, element_name(element), head_dim_qk, head_dim_v);
  const std::pair<const char*, bool> words[] = {
      {"band", f.band || f.chunk},
      {"mask", f.mask.has_value()},
      {"bias", f.bias.has_value()},
      {"unpaired_keys", f.unpaired_keys()},
      FLASH_FLAGS(FLAG_WORD){"flex", f.flex.has_value()},
      {"q_rotary", f.rotary && f.rotary->q},
      {"k_rotary", f.rotary && f.rotary->k},
      {f.cache.element ? element_name(*f.cache.element) : "", f.cache.element.has_value()},
      {format_name(f.cache.formats.k), f.cache.formats.quantised()},
      {format_name(f.cache.formats.v), f.cache.formats.v != f.cache.formats.k},
  };
  bool plain = true;
  for (const auto& [word, on] : words) {
    if (on) {
      add(" %s", word);
      plain = false;
    }
  }
  add(plain ? " plain" : "");
  key.without_lengths = key.length;
  for (const auto& [side, length] : {std::pair{'q', queries}, {'k', keys}}) {
    const auto limit = std::lower_bound(kClasses.begin(), kClasses.end(), length);
    const bool longest = limit == kClasses.end();
    add(" %c%s%d", side, longest ? ">" : "<=", longest ? kClasses.back() : *limit);
  }
  return key;
}

bool read_knob(std::string_view& text, std::string_view name, int& value) {
  std::string_view word = take_until(text, ' ');
  if (take_until(word, '=') != name) { return false; }
  const char* end = word.data() + word.size();
  const auto [rest, error] = std::from_chars(word.data(), end, value);
  return error == std::errc() && rest == end;
}

void TileRow::warn_cannot_run(std::string_view wanted) const {
  if (!warned_.exchange(true)) {
    std::fprintf(stderr,
                 "torch_metal_attn: a tuned table has the tile %s for %.*s: this tile cannot run "
                 "and is ignored\n",
                 tile_.c_str(), static_cast<int>(wanted.size()), wanted.data());
  }
}

const TileTable* tile_table() { return g_table; }

}  // namespace metal_attn
