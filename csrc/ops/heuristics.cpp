#include "csrc/ops/heuristics.h"

#include <algorithm>
#include <initializer_list>

#include "shaders/params.h"

namespace metal_attn {
namespace {

// A core has about 208 KB of registers. 116 of them for tiles, plus about 40 for addresses, softmax
// state and fragments in flight, leave room for 10 SIMD groups a core: two or three threadgroups.
// Reckoned from published figures; nobody here could measure it.
constexpr int kRegisterBudget = 116;

// Two row fragments share each K and V fragment that is loaded, which halves threadgroup reads a
// matrix operation. Above this head dim their accumulators alone would fill the register budget.
constexpr int kMaxHeadDimForTwoRows = 128;

// Four SIMD groups share one staged tile: fewer would stage each key more often, more would make
// threadgroups too big to keep two on a core.
constexpr int kSimdgroups = 4;

// A thread holds two of a fragment's 64 elements.
int fragment_registers(int bytes) { return 2 * bytes / 4; }

int q_registers(const FlashFwdSpecialisation& s) {
  return s.row_fragments * s.head_dim_qk / 8 * fragment_registers(element_bytes(s.element));
}

int accumulator_registers(const FlashFwdSpecialisation& s) {
  const int score_chains = s.head_dim_qk > CHAIN_COLUMNS ? 2 : 1;
  const int block_sums = 1;  // a block's share of one column fragment of the output
  const int fragments =
      s.row_fragments * (s.head_dim_v / 8 + block_sums + score_chains * s.block_k / 8);
  return fragments * fragment_registers(sizeof(float));
}

bool fits_with_q(const FlashFwdSpecialisation& s) {
  return accumulator_registers(s) + q_registers(s) <= kRegisterBudget;
}

const char* name_of(Element element) {
  switch (element) {
    case Element::kFloat:
      return "float";
    case Element::kHalf:
      return "half";
    case Element::kBfloat:
      return "bfloat";
  }
  return "";
}

}  // namespace

int element_bytes(Element element) { return element == Element::kFloat ? 4 : 2; }

int FlashFwdSpecialisation::registers() const {
  return accumulator_registers(*this) + (q_in_registers ? q_registers(*this) : 0);
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  const int elements = block_k * (padded(head_dim_qk) + padded(head_dim_v));
  return elements * element_bytes(element);
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem) {
  FlashFwdSpecialisation s{};
  s.element = problem.element;
  s.head_dim_qk = problem.head_dim_qk;
  s.head_dim_v = problem.head_dim_v;
  s.simdgroups = kSimdgroups;
  s.causal = problem.causal;
  s.wide_loads = problem.wide_loads;

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
  if (std::max(s.head_dim_qk, s.head_dim_v) > kMaxHeadDimForTwoRows || !fits_with_q(s)) {
    s.row_fragments = 1;
  }
  s.q_in_registers = fits_with_q(s);
  return s;
}

std::vector<Define> flash_fwd_defines(const FlashFwdSpecialisation& s) {
  return {
      {"ELEMENT", name_of(s.element)},
      {"HEAD_DIM_QK", std::to_string(s.head_dim_qk)},
      {"HEAD_DIM_V", std::to_string(s.head_dim_v)},
      {"ROW_FRAGMENTS", std::to_string(s.row_fragments)},
      {"BLOCK_K", std::to_string(s.block_k)},
      {"SIMDGROUPS", std::to_string(s.simdgroups)},
      {"Q_IN_REGISTERS", std::to_string(s.q_in_registers)},
      {"CAUSAL", std::to_string(s.causal)},
      {"WIDE_LOADS", std::to_string(s.wide_loads)},
  };
}

std::string describe_choice(const FlashFwdSpecialisation& s) {
  return std::to_string(8 * s.row_fragments) + " queries a SIMD group and Q " +
         (s.q_in_registers ? "in registers" : "read again for every block") + ": " +
         std::to_string(s.registers()) + " of " + std::to_string(kRegisterBudget) +
         " tile registers a thread; " + std::to_string(s.block_k) +
         " keys a block: " + std::to_string(s.threadgroup_bytes()) + " of " +
         std::to_string(THREADGROUP_MEMORY_BYTES) + " bytes of threadgroup memory; " +
         (s.wide_loads ? "16-byte loads of k and v"
                       : "element-wise loads of k and v, as some row is not 16-byte aligned");
}

}  // namespace metal_attn
