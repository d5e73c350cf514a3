// What the ops of decoding are given.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/ops/attention/types.h"
#include "csrc/ops/cache/types.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

struct FlashDecodeArguments {
  FlashFwdArguments forward;  // dense
  int64_t num_splits;         // 0: chosen from the sizes and the GPU's cores
};

// `append` as for append_kv, with cache_seqlens; its q is the queries if they are rotated. `decode`
// as for flash_decode over the caches of `append`, without lengths and tables of its own: those are
// cache_seqlens and the new keys, and rotary_cos and rotary_sin.
struct DecodeStepArguments {
  AppendKvArguments append;
  FlashDecodeArguments decode;
};

// New keys and values that the launch appends first: none without defines.
struct FlashDecodeAppend {
  Defines defines;
  torch::stable::Tensor k;
  torch::stable::Tensor v;
  AppendParams params;
  bool q_advances;
};

}  // namespace metal_attn
