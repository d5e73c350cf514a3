// What the ops of decoding are given.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/problem/attention.h"
#include "csrc/problem/cache.h"

namespace metal_attn {

// The keys, or blocks of neighbouring keys, that each block of queries sees alone.
struct KeyLists {
  OptionalTensor indices;  // (B or 1, Hkv or 1, lists, entries) int32; -1: none
  int64_t kv_block_size = 1;
  int64_t q_block_size = 1;
};

struct FlashDecodeArguments {
  FlashFwdArguments forward;  // dense
  int64_t num_splits;         // 0: chosen from the sizes and the GPU's cores
  KeyLists lists = {};
};

// `append` as for append_kv, with cache_seqlens; its q is the queries if they are rotated. `decode`
// as for flash_decode over the caches of `append`, without lengths and tables of its own: those are
// cache_seqlens and the new keys, and rotary_cos and rotary_sin.
struct DecodeStepArguments {
  AppendKvArguments append;
  FlashDecodeArguments decode;
};

}  // namespace metal_attn
