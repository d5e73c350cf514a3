// Tiles that the GPU or its compiler has refused in this process. They are not chosen again.
#pragma once

#include "csrc/tiles/tuned.h"

namespace metal_attn {

struct RefusedTile {
  std::string name;
  std::string why;
};

// By key, in the order of the refusals.
using RefusedTiles = std::map<std::string, std::vector<RefusedTile>, std::less<>>;

// Null: no tile was refused. Takes no lock.
const RefusedTiles* refused_tiles();

// The key does not depend on lengths. Each program of flex attention has its own key.
std::string refusals_key(const TileKey& key, const FlashFwdFeatures& features);

bool is_refused(const std::string& key, const std::string& name);

// Refuses the tile in all threads. Returns false if it was refused before.
bool refuse_tile(const std::string& key, const std::string& name, const std::string& why);

// The message for a key whose tiles are all refused, with the reason for each.
std::string no_tile_left(const std::string& key, std::string_view problem);

}  // namespace metal_attn
