#include "csrc/tiles/tuned.h"

#include <charconv>
#include <cstdio>
#include <stdexcept>
#include <system_error>

const void* metal_attn_make_tiles(const char* rows) {
  try {
    return new metal_attn::TileTable(rows);
  } catch (const std::invalid_argument&) {
    return nullptr;
  }
}

void metal_attn_use_tiles(const void* table) {
  metal_attn::use_tile_table(static_cast<const metal_attn::TileTable*>(table));
}

namespace metal_attn {
namespace {

// A length is in the class of the first of these that it does not exceed. Those up to 32 tell the
// rows of decoding apart.
constexpr std::array<int64_t, 6> kClasses{8, 16, 32, 512, 2048, 8192};

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::pair<std::string, int>> tile_of(const std::string& text) {
  std::vector<std::pair<std::string, int>> tile;
  for (const std::string& word : split(text, ' ')) {
    const std::size_t equals = std::min(word.find('='), word.size());
    int value = 0;
    const char* end = word.data() + word.size();
    const char* begin = word.data() + std::min(equals + 1, word.size());
    const auto [rest, error] = std::from_chars(begin, end, value);
    if (equals == 0 || error != std::errc() || rest != end) {
      throw std::invalid_argument("metal_attn: a tile has '" + word + "'");
    }
    tile.emplace_back(word.substr(0, equals), value);
  }
  return tile;
}

std::atomic<const TileTable*> g_table{nullptr};

}  // namespace

TileKey::TileKey(const char* kernel, Element element, int head_dim_qk, int head_dim_v,
                 const FlashFwdFeatures& f, int64_t queries, int64_t keys) {
  add(kernel);
  add_word(element_name(element));
  add_word("");
  add(head_dim_qk);
  add_word("");
  add(head_dim_v);
  const std::size_t before = size_;
  const auto feature = [this](const char* name, bool on) {
    if (on) {
      add_word(name);
    }
  };
  feature("band", f.band || f.chunk);
  feature("mask", f.mask.has_value());
  feature("bias", f.bias.has_value());
  feature("lone_keys", (f.mask && !f.mask->pairs) || (f.bias && !f.bias->pairs));
  feature("softcap", f.softcap);
  feature("dropout", f.dropout);
  feature("flex", f.flex.has_value());
  feature("q_rotary", f.rotary && f.rotary->q);
  feature("k_rotary", f.rotary && f.rotary->k);
  if (f.cache.element) {
    add_word(element_name(*f.cache.element));
  }
  if (f.cache.formats.quantised()) {
    add_word(format_name(f.cache.formats.k));
  }
  if (f.cache.formats.v != f.cache.formats.k) {
    add_word(format_name(f.cache.formats.v));
  }
  feature("plain", size_ == before);
  add_class("q", queries);
  add_class("k", keys);
}

void TileKey::add(std::string_view letters) {
  if (size_ + letters.size() > text_.size()) {
    throw std::length_error("metal_attn: the key of a tile is too long");
  }
  size_ += letters.copy(text_.data() + size_, letters.size());
}

void TileKey::add(int64_t number) {
  std::array<char, 20> digits;
  const char* end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  add(std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data())));
}

void TileKey::add_word(std::string_view word) {
  add(" ");
  add(word);
}

void TileKey::add_class(const char* of, int64_t length) {
  const auto found = std::lower_bound(kClasses.begin(), kClasses.end(), length);
  add_word(of);
  add(found != kClasses.end() ? "<=" : ">");
  add(found != kClasses.end() ? *found : kClasses.back());
}

const int* TileRow::find(std::string_view name) const {
  const auto found = std::find_if(tile_.begin(), tile_.end(),
                                  [name](const auto& own) { return own.first == name; });
  return found == tile_.end() ? nullptr : &found->second;
}

void TileRow::refuse(std::string_view wanted) const {
  if (refused_.exchange(true)) {
    return;
  }
  std::fprintf(stderr,
               "torch_metal_attn: a table of tiles has%s for %.*s, which cannot run: it is "
               "ignored\n",
               text().c_str(), static_cast<int>(wanted.size()), wanted.data());
}

bool TileRow::drop(const std::string& why) const {
  const bool for_one_key = key.find(' ') != std::string::npos;
  if (for_one_key && !dropped_.exchange(true)) {
    std::fprintf(stderr,
                 "torch_metal_attn: a table of tiles has%s for %s, which does not compile: the "
                 "row is ignored (%s). `python -m torch_metal_attn tune` measures the tiles anew\n",
                 text().c_str(), key.c_str(), why.c_str());
  }
  return for_one_key;
}

std::string TileRow::text() const {
  std::string text;
  for (const auto& [name, value] : tile_) {
    text += " " + name + "=" + std::to_string(value);
  }
  return text;
}

TileTable::TileTable(const char* rows) {
  for (const std::string& line : split(rows, '\n')) {
    const std::vector<std::string> parts = split(line, '\t');
    if (parts.size() != 3) {
      throw std::invalid_argument("metal_attn: a row of tiles has no three parts: " + line);
    }
    rows_.push_back(std::make_unique<const TileRow>(parts[0], tile_of(parts[1]), parts[2]));
  }
  std::sort(rows_.begin(), rows_.end(),
            [](const auto& a, const auto& b) { return a->key < b->key; });
}

const TileRow* TileTable::find(std::string_view key) const {
  const auto found =
      std::lower_bound(rows_.begin(), rows_.end(), key,
                       [](const auto& row, std::string_view wanted) { return row->key < wanted; });
  return found != rows_.end() && (*found)->key == key ? found->get() : nullptr;
}

const TileTable* tile_table() { return g_table; }

void use_tile_table(const TileTable* table) { g_table = table; }

}  // namespace metal_attn
