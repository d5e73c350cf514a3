// The tiles that a thread's last calls had: a call like one of them tries none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/problem/attention.h"
#include "csrc/problem/gpu.h"
#include "csrc/tiles/tuned.h"

namespace metal_attn {

// Everything that the choice of a tile depends on, as plain data.
struct TileRequest {
  FlashFwdProblem problem;
  // What the choice of only some kernels depends on.
  bool tensor_tiles = false;
  bool v_in_k = false;
  bool exact_delta = false;
  bool dkv = false;
  int64_t rows = 0;  // of decoding: queries that share a KV head
  // The rest is filled by `remembered_tile`.
  int q_class = 0;
  int k_class = 0;
  Gpu gpu = {};
  const TileTable* table = nullptr;
  uint64_t table_changes = 0;

  bool operator==(const TileRequest&) const = default;
};

inline std::size_t hash_of(const TileRequest& request) {
  const FlashFwdProblem& p = request.problem;
  std::size_t hash = 0;
  for (const int64_t part : {int64_t{p.head_dim_qk}, int64_t{p.head_dim_v}, p.queries, p.q_length,
                             request.rows, int64_t{p.features.band}, int64_t{p.aligned}}) {
    hash = (hash ^ static_cast<std::size_t>(part)) * 0x9E3779B97F4A7C15u;
  }
  return hash >> 32;
}

// `choose()`, tuned for these lengths; remembered by thread, so that nothing is locked. Of two
// requests with one place the later one stays.
template <class Specialisation, class Choose>
Specialisation remembered_tile(TileRequest request, int64_t queries, int64_t keys, const Gpu& gpu,
                               const Choose& choose) {
  struct Remembered {
    TileRequest request;
    Specialisation tile;
  };
  constexpr std::size_t kPlaces = 32;
  static thread_local std::array<std::optional<Remembered>, kPlaces> all;
  request.q_class = length_class(queries);
  request.k_class = length_class(keys);
  request.gpu = gpu;
  request.table = tile_table();
  request.table_changes = tile_table_changes();
  std::optional<Remembered>& place = all[hash_of(request) % kPlaces];
  if (!place || place->request != request) {
    const Specialisation estimated = choose();
    place = Remembered{request, tuned(estimated, estimated.kernel(), queries, keys)};
  }
  return place->tile;
}

}  // namespace metal_attn
