#include "csrc/tiles/flash_fwd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "csrc/ops/cache/choose.h"
#include "csrc/ops/common/check.h"
#include "csrc/tiles/flash_fwd_tensor.h"
#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// A threadgroup accumulates at most this many columns of the output. Wider values are cut into
// slices over the grid, each of which computes the scores again: 512 columns of accumulators alone
// would take all 128 registers that a thread of M1 can have.
constexpr int kMaxSlice = 256;

// A block takes two barriers and a rescaling of the output.
constexpr int kBlockLoads = 12;

// What a thread loads, and its blocks, for 32 keys and 8 queries.
int cost(const FlashFwdSpecialisation& s) {
  const int columns = fragments(s.head_dim_qk) + s.v_slice / 8;
  const int blocks = 32 / s.block_k;
  const int staged = columns * 4 / s.row_fragments;
  const int q = s.q_in_registers ? 0 : blocks * fragments(s.head_dim_qk) * row_loads(s);
  return s.v_slices() * (staged + q + blocks * kBlockLoads);
}

}  // namespace

int FlashFwdSpecialisation::registers() const {
  if (tensor_tiles) {
    return tensor_registers(*this);
  }
  const int pair = fragment_registers(sizeof(float));
  const int operand = fragment_registers(element_bytes(kv_element(*this)));
  const int q = row_fragments * fragments(head_dim_qk) * fragment_registers(element_bytes(element));
  const int out = row_fragments * v_slice / 8 * pair;
  const int chains = head_dim_qk > CHAIN_COLUMNS ? 2 : 1;
  const int scores = chains * row_fragments * block_k / 8 * pair;
  // A thread's share of the tiles, on its way to threadgroup memory. Half precision's is covered by
  // what the products need.
  const int columns = 8 * fragments(head_dim_qk) + v_slice;
  const int staged = block_k * columns * operand / 2 / threads();
  const int in_flight = operand > 1 ? std::max(staged - 16, 0) : 0;
  // Weights, and the fragments of k and v that they meet.
  const double tiles = 44 + 0.9 * out + 0.8 * (q_in_registers ? q : 0) + 1.9 * scores;
  return int(std::ceil(tiles + 0.55 * in_flight)) + feature_registers(features);
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  if (tensor_tiles) {
    return 0;
  }
  const int elements = block_k * (padded(8 * fragments(head_dim_qk)) + padded(v_slice));
  return elements * element_bytes(kv_element(*this));
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem, const Gpu& gpu) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.simdgroups = simdgroups_for(s.features.q_block());
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = problem.q_pairs;

  // The fewest loads of what fits; of equals the first, which has the most keys a block.
  std::optional<FlashFwdSpecialisation> best;
  const int fewest = (problem.head_dim_v + kMaxSlice - 1) / kMaxSlice;
  for (int slices = fewest; !best; ++slices) {
    s.v_slice = slice_columns(problem.head_dim_v, slices);
    for (int block_k : {32, 16, 8}) {
      for (int row_fragments : {2, 1}) {
        for (bool held : {true, false}) {
          s.block_k = block_k;
          s.row_fragments = row_fragments;
          s.q_in_registers = held;
          if (fits(s, gpu) && within_blocks(s.features, s.block_q(), s.block_k) &&
              (!best || cost(s) < cost(*best))) {
            best = s;
          }
        }
      }
    }
  }
  return *best;
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines own{
      {"V_SLICE", s.v_slice},       {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups}, {"Q_IN_REGISTERS", s.q_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  return all_defines(s, own, s.wide_rotary);
}

std::array<uint32_t, 3> flash_fwd_threadgroups(const FlashFwdCall& call,
                                               const FlashFwdSpecialisation& s) {
  // Metal's positions in the grid are 32-bit, counted in threads.
  const int64_t block_q = s.block_q();
  const int64_t blocks = (call.q_length + block_q - 1) / block_q;
  const int64_t max_blocks = std::numeric_limits<uint32_t>::max() / s.threads();
  check(blocks <= max_blocks, "q has a length of ", call.q_length, "; with head dims ",
        s.head_dim_qk, " and ", s.head_dim_v, " it must be at most ", max_blocks * block_q);
  const int64_t columns = int64_t{call.heads} * s.v_slices();
  check(columns <= kMaxLength, "q has ", call.heads, " heads; with a head dim of ", s.head_dim_v,
        " of v it must be at most ", kMaxLength / s.v_slices());
  // Packed: one more row of the grid writes the rows of no sequence.
  const int64_t sequences = int64_t{call.batch} + (s.features.varlen ? 1 : 0);
  return {static_cast<uint32_t>(std::max<int64_t>(blocks, s.features.varlen ? 1 : 0)),
          static_cast<uint32_t>(columns), static_cast<uint32_t>(sequences)};
}

std::string describe_choice(const FlashFwdSpecialisation& s, const Gpu& gpu) {
  const std::string staged = s.tensor_tiles
                                 ? " straight from memory; "
                                 : ": " + std::to_string(s.threadgroup_bytes()) + " of " +
                                       std::to_string(THREADGROUP_MEMORY_BYTES) +
                                       " bytes of threadgroup memory; ";
  std::string slices;
  if (s.v_slices() > 1) {
    slices = "v in " + std::to_string(s.v_slices()) + " slices of " + std::to_string(s.v_slice) +
             " columns, each with the scores computed again; ";
  }
  const std::string bytes = std::to_string(kv_load_bytes(s.element, s.features.cache.format));
  std::string loads = bytes + "-byte loads of k and v";
  if (!s.wide_loads) {
    loads = "element-wise loads of k and v, as some row is not " + bytes +
            "-byte aligned or a head dim is no multiple of 8";
  }
  if (s.features.rotary && s.features.rotary->k && !s.wide_rotary) {
    loads += "; k rotated element by element";
  }
  return (s.tensor_tiles ? "tensor tiles: " : "") + std::to_string(8 * s.row_fragments) +
         " queries a SIMD group and Q " +
         (s.q_in_registers ? "in registers" : "read again for every block") + ": " +
         register_text(s, gpu) + "; " + std::to_string(s.block_k) + " keys a block" + staged +
         slices + loads;
}

}  // namespace metal_attn
