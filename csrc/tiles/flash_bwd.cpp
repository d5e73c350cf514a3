#include "csrc/tiles/flash_bwd.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// A block takes two barriers, and addresses and bounds of what is staged.
constexpr int kBlockLoads = 20;

// A load of device memory takes as long as this many of threadgroup memory.
constexpr int kRowLoads = 3;

}  // namespace

int FlashBwdSpecialisation::qk_slice() const { return slice_columns(head_dim_qk, slices); }

int FlashBwdSpecialisation::v_slice() const { return slice_columns(head_dim_v, slices); }

bool FlashBwdSpecialisation::normalised() const {
  const bool others = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv && others));
}

// Fitted to bench/results/registers.md: of the tiles that a kernel holds a part is not alive when
// most registers are in use.
int FlashBwdSpecialisation::registers() const {
  const int pair = fragment_registers(sizeof(float));
  const int gradients = row_fragments * (qk_slice() + (dkv ? v_slice() : 0)) / 8 * pair;
  // Weights and their gradients; with a cap its slope too. With dropout dk and dv have weights of
  // their own, and random numbers.
  const bool drops = dkv && features.dropout;
  const int score_tiles = 2 + second_chains(*this) + (features.softcap ? 1 : 0) + drops;
  const int scores = row_fragments * score_tiles * block / 8 * pair;
  // A thread's share of the staged tiles.
  const int columns = head_dim_qk + head_dim_v + qk_slice() + (dkv ? v_slice() : 0);
  const int staged = block * columns * element_bytes(element) / 4 / threads();
  const bool wide = element == Element::kFloat;
  // Gradients that leave little room for the rest.
  const int many = wide ? std::max(gradients - 32, 0) : 0;
  // Chunks that do not divide evenly among threads.
  const bool uneven = head_dim_qk % 32 != 0 || head_dim_v % 32 != 0;
  const int held = held_registers(*this);
  const int added = feature_registers(features);
  if (dkv) {
    const double tiles = 0.68 * gradients + 0.6 * held + 0.75 * scores + 0.34 * staged + 1.2 * many;
    return int(std::lround(70 + tiles)) + (rows_in_registers ? 12 : 2 * row_fragments) +
           (uneven ? 12 : 0) + (wide ? std::max(head_dim_qk - 192, 0) / 7 : 0) + 16 * drops +
           (features.softcap ? 2 : 0) + (features.rotary && !rows_in_registers ? 20 : 0) + added;
  }
  const double tiles = 0.57 * gradients + 0.79 * held + 0.95 * scores + 0.21 * staged + 0.3 * many;
  const int rotated = features.rotary ? (features.rotary->k ? 12 : 3) : 0;
  return int(std::lround(63 + tiles)) + (rows_in_registers ? 0 : 7 * row_fragments) +
         (uneven ? 2 : 0) + (wide ? 5 : 0) + 2 * (row_fragments - 1) +
         std::max(head_dim_qk - 256, 0) / 24 + rotated + added;
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int rows = padded(qk_slice()) + (dkv ? padded(v_slice()) : 0);
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv ? row_statistics * block : exact_delta ? simdgroups : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float));
}

namespace {

// What a thread loads and multiplies for 8 rows of its side and 32 of the other. Of what fits, a
// replay had these in the same order (bench/results/replay.md).
int cost(const FlashBwdSpecialisation& s) {
  const int columns = fragments(s.head_dim_qk) + fragments(s.head_dim_v);
  const int own_columns = (s.qk_slice() + (s.dkv ? s.v_slice() : 0)) / 8;
  const int blocks = 32 / s.block;
  const int products = (columns + own_columns) * 4;
  int work = products + products / s.row_fragments;
  if (s.row_fragments * s.block == 8) {
    work += work / 4;  // one fragment of scores: every product waits for the one before
  }
  const int rows = s.rows_in_registers ? 0 : kRowLoads * blocks * columns * row_loads(s);
  return s.slices * (work + rows + blocks * kBlockLoads);
}

// Of what has enough registers the cheapest. If nothing has, what lacks fewest: it spills.
std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta, const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = s.wide_loads;
  s.dkv = dkv;
  s.exact_delta = exact_delta;

  const auto rank = [&gpu](const FlashBwdSpecialisation& one) {
    return std::pair(std::max(one.registers() - register_limit(gpu), 0), cost(one));
  };
  std::optional<FlashBwdSpecialisation> best;
  std::pair<int, int> best_rank;
  const int most_slices = std::max(fragments(s.head_dim_qk), fragments(s.head_dim_v));
  for (s.slices = 1; s.slices <= most_slices; ++s.slices) {
    const std::pair<int, int> before = best_rank;
    // Eight stage a tile with fewer registers each, but fewer such threadgroups fit on a core.
    const int fewest = simdgroups_for(dkv ? s.features.kv_block() : s.features.q_block());
    for (int simdgroups : {fewest, 2 * fewest}) {
      s.simdgroups = simdgroups;
      for (int block : {32, 16, 8}) {
        s.block = block;
        for (int row_fragments : {2, 1}) {
          s.row_fragments = row_fragments;
          for (bool held : {true, false}) {
            s.rows_in_registers = held;
            const int queries = dkv ? s.block : s.block_rows();
            const int keys = dkv ? s.block_rows() : s.block;
            if (s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES &&
                within_blocks(s.features, queries, keys) && (!best || rank(s) < best_rank)) {
              best = s;
              best_rank = rank(s);
            }
          }
        }
      }
    }
    // Each slice computes the scores again: if one more was no better, two more are not either.
    if (best && best_rank.first == 0 && best_rank == before) {
      break;
    }
  }
  return best;
}

}  // namespace

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta, const Gpu& gpu) {
  return choose_flash_bwd(problem, false, exact_delta, gpu);
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta, const Gpu& gpu) {
  return choose_flash_bwd(problem, true, exact_delta, gpu);
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  Defines own{
      {s.dkv ? "DK_SLICE" : "DQ_SLICE", s.qk_slice()},
      {s.dkv ? "BLOCK_Q" : "BLOCK_K", s.block},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  if (s.dkv) {
    own.push_back({"DV_SLICE", s.v_slice()});
    own.push_back({"SLICES", s.slices});
  }
  if (s.exact_delta && !s.dkv) {
    own.push_back({"EXACT_DELTA", 1});
  }
  if (s.normalised()) {
    own.push_back({"NORMALISED", 1});
  }
  return all_defines(s, own, s.wide_rotary);
}

}  // namespace metal_attn
