// How a tile was chosen, in JSON, and what `tune` measures instead of it.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/ops/common/json.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/tiles/tuned.h"

namespace metal_attn {

// Adds "choice", and "tuning": the key of a table's row, and the tiles that are worth a
// measurement, the chosen one first.
template <class Specialisation>
JsonObject& add_choice(JsonObject& object, const Specialisation& s, const char* kernel,
                       int64_t queries, int64_t keys) {
  JsonObject tuning;
  tuning.add("key", std::string(tile_key(kernel, s, queries, keys).text()))
      .add("candidates", tile_candidates(s, gpu()));
  return object.add("choice", s.choice).add("tuning", tuning);
}

}  // namespace metal_attn
