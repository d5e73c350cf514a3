// What the ops of decoding are given.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/problem/attention.h"
#include "csrc/problem/cache.h"

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

}  // namespace metal_attn
