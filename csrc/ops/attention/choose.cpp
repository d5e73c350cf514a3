#include "csrc/ops/attention/choose.h"

#include <algorithm>
#include <limits>

#include "csrc/ops/attention/choose_shared.h"
#include "csrc/ops/cache/choose.h"
#include "csrc/ops/common/check.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// A threadgroup accumulates at most this many columns of the output. Wider values are cut into
// slices over the grid, each of which computes the scores again: 512 columns of accumulators alone
// would take all 128 registers that a thread can have.
constexpr int kMaxSlice = 256;

// Two row fragments share each K and V fragment that is loaded, which halves threadgroup reads a
// matrix operation. Above this head dim their accumulators alone would fill the register budget.
constexpr int kMaxHeadDimForTwoRows = 128;

// Threadgroups that keep the largest GPU, of 80 cores, busy.
constexpr int64_t kBusyThreadgroups = 80 * kThreadgroupsPerCore;

// Columns of a slice, a multiple of 8.
int slice_columns(int columns, int slices) {
  return 8 * ((fragments(columns) + slices - 1) / slices);
}

int q_registers(const FlashFwdSpecialisation& s) {
  return s.row_fragments * fragments(s.head_dim_qk) * fragment_registers(element_bytes(s.element));
}

int accumulator_registers(const FlashFwdSpecialisation& s) {
  const int score_chains = s.head_dim_qk > CHAIN_COLUMNS ? 2 : 1;
  const int block_sums = 1;  // a block's share of one column fragment of the output
  const int count = s.row_fragments * (s.v_slice / 8 + block_sums + score_chains * s.block_k / 8);
  return count * fragment_registers(sizeof(float));
}

bool fits_with_q(const FlashFwdSpecialisation& s) {
  return accumulator_registers(s) + q_registers(s) <= kRegisterBudget;
}

// Of a gradient's kernel: rows in registers first, and two row fragments, which halve the loads a
// matrix operation; then the largest block. False if none fits.
template <class Specialisation>
bool choose_rows(Specialisation& s, int& s_block) {
  for (bool held : {true, false}) {
    for (int row_fragments : {2, 1}) {
      for (int block : {32, 16, 8}) {
        s.rows_in_registers = held;
        s.row_fragments = row_fragments;
        s_block = block;
        if ((held || row_fragments == 1) && fits(s)) {
          return true;
        }
      }
    }
  }
  return false;
}

// Registers of the two operands whose rows a gradient's kernel owns.
template <class Specialisation>
int held_registers(const Specialisation& s) {
  const int count = s.row_fragments * (fragments(s.head_dim_qk) + fragments(s.head_dim_v));
  return s.rows_in_registers ? count * fragment_registers(element_bytes(s.element)) : 0;
}

template <class Specialisation>
int second_chains(const Specialisation& s) {
  return s.head_dim_qk > CHAIN_COLUMNS || s.head_dim_v > CHAIN_COLUMNS ? 1 : 0;
}

// Columns of the two tiles that are staged as pairs.
template <class Specialisation>
int pair_columns(const Specialisation& s) {
  return padded(8 * fragments(s.head_dim_qk)) + padded(8 * fragments(s.head_dim_v));
}

}  // namespace

int FlashFwdSpecialisation::registers() const {
  return accumulator_registers(*this) + (q_in_registers ? q_registers(*this) : 0);
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  const int elements = block_k * (padded(8 * fragments(head_dim_qk)) + padded(v_slice));
  return elements * element_bytes(kv_element(*this));
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  const int slices = (problem.head_dim_v + kMaxSlice - 1) / kMaxSlice;
  s.v_slice = slice_columns(problem.head_dim_v, slices);
  s.wide_rotary = wide_rotary(problem);

  // More keys a block mean fewer barriers and rescalings a key.
  for (int block_k : {32, 16, 8}) {
    s.block_k = block_k;
    if (s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES) {
      break;
    }
  }
  // Q is read again for every block, so it moves out of registers only where one row fragment of
  // queries does not fit either.
  s.row_fragments = 2;
  if (std::max(s.head_dim_qk, s.v_slice) > kMaxHeadDimForTwoRows || !fits_with_q(s)) {
    s.row_fragments = 1;
  }
  s.q_in_registers = fits_with_q(s);
  return s;
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines own{
      {"V_SLICE", s.v_slice},
      {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups},
      {"Q_IN_REGISTERS", s.q_in_registers},
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

std::string describe_choice(const FlashFwdSpecialisation& s) {
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
  return std::to_string(8 * s.row_fragments) + " queries a SIMD group and Q " +
         (s.q_in_registers ? "in registers" : "read again for every block") + ": " +
         std::to_string(s.registers()) + " of " + std::to_string(kRegisterBudget) +
         " tile registers a thread; " + std::to_string(s.block_k) +
         " keys a block: " + std::to_string(s.threadgroup_bytes()) + " of " +
         std::to_string(THREADGROUP_MEMORY_BYTES) + " bytes of threadgroup memory; " + slices +
         loads;
}

int FlashBwdSpecialisation::qk_slice() const { return slice_columns(head_dim_qk, slices); }

int FlashBwdSpecialisation::v_slice() const { return slice_columns(head_dim_v, slices); }

bool FlashBwdSpecialisation::normalised() const {
  const bool others = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv && others));
}

int FlashBwdSpecialisation::registers() const {
  const int gradients = (qk_slice() + (dkv ? v_slice() : 0)) / 8;
  const int block_sums = 1;
  // Weights and their gradients; with a cap its slope too.
  const int score_tiles = 2 + second_chains(*this) + (features.softcap ? 1 : 0);
  const int accumulators = row_fragments * (gradients + block_sums + score_tiles * block / 8);
  return held_registers(*this) + accumulators * fragment_registers(sizeof(float));
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int rows = padded(qk_slice()) + (dkv ? padded(v_slice()) : 0);
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv ? row_statistics * block : exact_delta ? simdgroups : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float));
}

namespace {

// The fewest slices first, since each computes the scores again.
std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  s.wide_rotary = wide_rotary(problem);
  s.dkv = dkv;
  s.exact_delta = exact_delta;
  const int most_slices = std::max(fragments(s.head_dim_qk), fragments(s.head_dim_v));
  for (s.slices = 1; s.slices <= most_slices; ++s.slices) {
    if (choose_rows(s, s.block)) {
      return s;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta) {
  return choose_flash_bwd(problem, false, exact_delta);
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta) {
  return choose_flash_bwd(problem, true, exact_delta);
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  Defines own{
      {s.dkv ? "DK_SLICE" : "DQ_SLICE", s.qk_slice()},
      {s.dkv ? "BLOCK_Q" : "BLOCK_K", s.block},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
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

int FlashBwdBiasSpecialisation::registers() const {
  // Scores, their gradients, and the sum of those.
  const int score_tiles = 3 + second_chains(*this);
  return held_registers(*this) +
         row_fragments * score_tiles * block_k / 8 * fragment_registers(sizeof(float));
}

int FlashBwdBiasSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int column_sums = simdgroups * block_k * int(sizeof(float));
  return block_k * pairs * element_bytes(element) + column_sums;
}

std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem) {
  auto s = specialisation_for<FlashBwdBiasSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  s.wide_rotary = wide_rotary(problem);
  if (choose_rows(s, s.block_k)) {
    return s;
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
