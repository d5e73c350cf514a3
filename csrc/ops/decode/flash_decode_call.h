// One call of flash_decode or decode_step, checked, and its launches.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/choose.h"
#include "csrc/ops/decode/flash_decode.h"
#include "shaders/params.h"

namespace metal_attn {

struct FlashDecodeCall {
  FlashFwdCall forward;
  FlashDecodeSpecialisation specialisation;
  int64_t splits;
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

// Every check, then the choice of kernel. `aligned`: what else the kernel reads is as k and v are
// when they are aligned. Throws std::invalid_argument.
FlashDecodeCall analyse(const FlashDecodeArguments& arguments, bool aligned);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> run(const FlashDecodeCall& call,
                                                             const FlashFwdArguments& arguments,
                                                             const FlashDecodeAppend* append,
                                                             Backend& backend);

std::string explain(const FlashDecodeCall& call, const FlashFwdArguments& arguments,
                    const FlashDecodeAppend* append);

}  // namespace metal_attn
