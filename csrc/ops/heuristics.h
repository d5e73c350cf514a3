// How a kernel is specialised for a problem: every tuning number of the host side is in
// heuristics.cpp. Pure functions of plain data.
#pragma once

#include <string>
#include <vector>

#include "csrc/runtime/launch.h"

namespace metal_attn {

enum class Element { kFloat, kHalf, kBfloat };

int element_bytes(Element element);

// What may differ between two calls that the choice depends on.
struct FlashFwdProblem {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool causal;      // some query does not see some key
  bool wide_loads;  // every row of k and v is 16-byte aligned
};

struct FlashFwdSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int row_fragments;  // 8-row fragments of queries a SIMD group owns
  int block_k;        // keys staged at a time
  int simdgroups;     // per threadgroup
  bool q_in_registers;
  bool causal;
  bool wide_loads;

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int registers() const;          // an estimate: 32-bit registers of a thread that hold tiles
  int threadgroup_bytes() const;  // exact: the shader's static K and V tiles
};

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem);

std::vector<Define> flash_fwd_defines(const FlashFwdSpecialisation& specialisation);

// The choice and its reasons in one sentence or two, for `explain`.
std::string describe_choice(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
