#include "csrc/tiles/flash_bwd_bias.h"

#include <algorithm>

#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// Threadgroups that keep the largest GPU, of 80 cores, busy.
constexpr int64_t kBusyThreadgroups = 80 * kSimdgroupsPerCore / kSimdgroups;

}  // namespace

int FlashBwdBiasSpecialisation::registers() const {
  // Scores, their gradients, and the sum of those.
  const int score_tiles = 3 + second_chains(*this);
  const int scores = row_fragments * score_tiles * block_k / 8 * fragment_registers(sizeof(float));
  return 54 + held_registers(*this) + scores + feature_registers(features);
}

int FlashBwdBiasSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int column_sums = simdgroups * block_k * int(sizeof(float));
  return block_k * pairs * element_bytes(element) + column_sums;
}

// Rows in registers first, and two row fragments, which halve the loads a matrix operation; then
// the largest block. Tiles are within the blocks of a BlockMask.
std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem,
                                                                const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdBiasSpecialisation>(problem);
  s.simdgroups = simdgroups_for(s.features.q_block());
  s.wide_rotary = wide_rotary(problem);
  for (bool held : {true, false}) {
    for (int row_fragments : {2, 1}) {
      for (int block : {32, 16, 8}) {
        s.rows_in_registers = held;
        s.row_fragments = row_fragments;
        s.block_k = block;
        if ((held || row_fragments == 1) && fits(s, gpu) &&
            within_blocks(s.features, s.block_q(), s.block_k)) {
          return s;
        }
      }
    }
  }
  return std::nullopt;
}

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& s) {
  Defines own{
      {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
  };
  return all_defines(s, own, s.wide_rotary);
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
