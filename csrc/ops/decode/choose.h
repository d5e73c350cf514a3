// What a call of decoding is, once its kernel is chosen.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/problem/attention.h"
#include "csrc/problem/decode.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/flash_decode.h"

namespace metal_attn {

// One call of flash_decode or decode_step, checked, and the kernel that was chosen for it.
struct FlashDecodeCall {
  FlashFwdCall forward;
  FlashDecodeSpecialisation specialisation;
  int64_t keys;  // that the queries of one sequence read, at most
  int64_t splits;
  int64_t row_groups;  // threadgroups among which the rows of a KV head are dealt out
  std::array<uint32_t, 3> threadgroups;

  // Queries of all heads that share a KV head.
  int64_t rows() const { return int64_t{forward.q_length} * (forward.heads / forward.kv_heads); }
};

// New keys and values that the launch appends first: none without defines.
struct FlashDecodeAppend {
  Defines defines;
  torch::stable::Tensor k;
  torch::stable::Tensor v;
  AppendParams params;
  bool q_advances;
};

// `forward` as checked. `appends`: the launch writes new keys first. Nothing is chosen where
// nothing is launched.
FlashDecodeCall choose_flash_decode(const FlashFwdCall& forward,
                                    const FlashDecodeArguments& arguments, bool appends);

Defines flash_decode_defines(const FlashDecodeCall& call, const FlashDecodeAppend* append);

}  // namespace metal_attn
