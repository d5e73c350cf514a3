#include "csrc/tiles/flash_bwd_bias.h"

#include <algorithm>

#include "csrc/tiles/shared.h"
#include "csrc/tiles/table.inc"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// Threadgroups that keep the largest GPU, of 80 cores, busy.
constexpr int64_t kBusyThreadgroups = 80 * kSimdgroupsPerCore / kSimdgroups;

constexpr DefaultRow<FlashBwdBiasTile> kRows[] = {FLASH_BWD_BIAS_ROWS(TILE_ROW)};

}  // namespace

int FlashBwdBiasSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int column_sums = simdgroups * block_k * int(sizeof(float));
  return block_k * pairs * element_bytes(element) + column_sums;
}

std::span<const DefaultRow<FlashBwdBiasTile>> FlashBwdBiasSpecialisation::table() { return kRows; }

bool FlashBwdBiasSpecialisation::take(const FlashBwdBiasTile& tile) {
  Tiled::tile() = tile;
  block_k = 8 * parts_within(features.kv_block(), 8, block_k / 8);
  simdgroups = parts_within(features.q_block(), 8 * row_fragments, simdgroups);
  return simdgroups > 0 && threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem,
                                                                const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdBiasSpecialisation>(problem);
  s.wide_rotary = wide_rotary(problem);
  return default_tile(s, gpu);
}

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& s) {
  Defines own{
      {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
  };
  return all_defines(s, own);
}

// No more parts than keep the GPU busy: each writes float32 of the whole bias, which is then less
// than twice kBusyThreadgroups tiles, however large the bias is.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared) {
  if (owned == 0 || shared == 0) {
    return 1;
  }
  return std::min(shared, (kBusyThreadgroups + owned - 1) / owned);
}

}  // namespace metal_attn
