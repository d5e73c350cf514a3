#include "csrc/tiles/flash_bwd.h"

#include <algorithm>
#include <cmath>

#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// What is on its way to threadgroup memory, or read again, beyond what the products need.
int in_flight(const FlashBwdSpecialisation& s) {
  if (s.element != Element::kFloat) {
    const int columns = s.head_dim_qk + s.head_dim_v + s.qk_slice() + s.v_slice();
    return s.dkv ? std::max(s.block * columns / 2 / s.threads() - 16, 0) / 2 : 0;
  }
  if (!s.dkv) {
    return s.rows_in_registers ? (s.head_dim_qk % 32 != 0 ? 8 : 0) : 20;
  }
  return s.slices == 1 ? s.head_dim_qk / 3 : 22 + std::max(s.head_dim_qk - 192, 0) / 8;
}

}  // namespace

int FlashBwdSpecialisation::qk_slice() const { return slice_columns(head_dim_qk, slices); }

int FlashBwdSpecialisation::v_slice() const { return slice_columns(head_dim_v, slices); }

bool FlashBwdSpecialisation::normalised() const {
  const bool others = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv && others));
}

int FlashBwdSpecialisation::registers() const {
  const int pair = fragment_registers(sizeof(float));
  const int gradients = row_fragments * (qk_slice() + (dkv ? v_slice() : 0)) / 8 * pair;
  // Weights and their gradients; with a cap its slope too.
  // With dropout dk and dv have weights of their own, and random numbers.
  const bool drops = dkv && features.dropout;
  const int score_tiles = 2 + second_chains(*this) + (features.softcap ? 1 : 0) + drops;
  const int scores = row_fragments * score_tiles * block / 8 * pair;
  if (dkv) {
    const double tiles = 1.05 * gradients + 1.45 * held_registers(*this) + 2.9 * scores;
    // Chunks that do not divide evenly among threads.
    const int uneven = head_dim_qk % 32 != 0 || head_dim_v % 32 != 0 ? 11 : 0;
    return int(std::ceil(42 + tiles)) + uneven + 8 * drops + in_flight(*this) +
           feature_registers(features);
  }
  const double tiles = 0.75 * gradients + 0.85 * held_registers(*this) + 1.75 * scores;
  const int second_row = row_fragments > 1 ? 4 : 0;
  const int wide = std::max(head_dim_qk - 256, 0) / 12;
  const int rotary = features.rotary ? 6 : 0;
  return int(std::ceil(54.5 + tiles)) + second_row + wide + rotary + in_flight(*this) +
         feature_registers(features);
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int rows = padded(qk_slice()) + (dkv ? padded(v_slice()) : 0);
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv ? row_statistics * block : exact_delta ? simdgroups : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float));
}

namespace {

// What a thread loads and multiplies, and its barriers, for 8 rows of its side and 32 of the other.
int cost(const FlashBwdSpecialisation& s) {
  const int columns = fragments(s.head_dim_qk) + fragments(s.head_dim_v);
  const int own_columns = (s.qk_slice() + (s.dkv ? s.v_slice() : 0)) / 8;
  const int blocks = 32 / s.block;
  const int products = (columns + own_columns) * 4;
  const int rows = s.rows_in_registers ? 0 : blocks * columns * row_loads(s);
  return s.slices * (products + products / s.row_fragments + rows + blocks * kBarrierLoads);
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta, const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = s.wide_loads;
  s.dkv = dkv;
  s.exact_delta = exact_delta;

  std::optional<FlashBwdSpecialisation> best;
  const int most_slices = std::max(fragments(s.head_dim_qk), fragments(s.head_dim_v));
  for (s.slices = 1; s.slices <= most_slices; ++s.slices) {
    for (int block : {32, 16, 8}) {
      for (int row_fragments : {2, 1}) {
        for (bool held : {true, false}) {
          s.block = block;
          s.row_fragments = row_fragments;
          s.rows_in_registers = held;
          if (fits(s, gpu) && (!best || cost(s) < cost(*best))) {
            best = s;
          }
        }
      }
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
