// Tiles that the GPU or its compiler has refused in this process: choosers leave them out.
#pragma once

#include "csrc/tiles/tuned.h"

namespace metal_attn {

struct RefusedTile {
  std::string name;
  std::string why;
};

// By key, in the order in which they were refused.
using RefusedTiles = std::map<std::string, std::vector<RefusedTile>, std::less<>>;

// Those until now, or null: there are none. Whoever asks waits for nobody.
const RefusedTiles* refused_tiles();

// The same for every length, and one for each program of flex attention.
std::string refusals_key(const TileKey& key, const FlashFwdFeatures& features);

bool is_refused(const std::string& key, const std::string& name);

// From now on it is left out in all threads. Returns whether it was not yet.
bool refuse_tile(const std::string& key, const std::string& name, const std::string& why);

// Why none of the tiles with this key is left, with the reason of each.
std::string no_tile_left(const std::string& key, std::string_view problem);

}  // namespace metal_attn
