#include "csrc/tiles/refused.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <sstream>

namespace metal_attn {
namespace {

// Updates replace the whole map and never free the old one: another thread may be reading it.
std::atomic<const RefusedTiles*> g_refused{nullptr};

std::string first_line_of(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

const RefusedTiles* refused_tiles() { return g_refused.load(std::memory_order_acquire); }

std::string refusals_key(const TileKey& key, const FlashFwdFeatures& features) {
  std::ostringstream text;
  text << key.problem();
  if (features.flex) {
    const FlexFeatures& f = *features.flex;
    for (const char* part : {f.captures, f.score, f.slope, f.mask, f.share, f.place}) {
      text << ' ' << static_cast<const void*>(part);
    }
  }
  return text.str();
}

bool is_refused(const std::string& key, const std::string& name) {
  const RefusedTiles* all = refused_tiles();
  if (all == nullptr || !all->contains(key)) { return false; }
  const std::vector<RefusedTile>& tiles = all->at(key);
  return std::any_of(tiles.begin(), tiles.end(),
                     [&](const RefusedTile& tile) { return tile.name == name; });
}

bool refuse_tile(const std::string& key, const std::string& name, const std::string& why) {
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (is_refused(key, name)) { return false; }
  const RefusedTiles* old = refused_tiles();
  auto updated = std::make_unique<RefusedTiles>(old == nullptr ? RefusedTiles() : *old);
  (*updated)[key].push_back({name, why});
  g_refused.store(updated.release(), std::memory_order_release);
  return true;
}

std::string no_tile_left(const std::string& key, std::string_view problem) {
  const std::vector<RefusedTile>& tiles = refused_tiles()->find(key)->second;
  const std::string& why = tiles.front().why;
  if (tiles.size() == 1) { return why; }
  const std::string first = first_line_of(why);
  std::ostringstream text;
  text << first << "; all " << tiles.size() << " tiles of " << problem << " are refused"
       << why.substr(first.size());
  for (std::size_t i = 1; i < tiles.size(); ++i) { text << '\n' << first_line_of(tiles[i].why); }
  return text.str();
}

}  // namespace metal_attn
