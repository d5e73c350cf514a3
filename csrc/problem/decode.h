// The arguments of the ops of decoding.
#pragma once

#include "csrc/problem/attention.h"

// X(type, name, default, whether decode_step has it) of decoding's ops alone, after num_splits in
// their schemas.
// - cu_seqlens_q: (B + 1) int32. q, and new keys and values, are packed rows, (T, heads, columns).
// - max_seqlen_q: the most queries of a sequence, with cu_seqlens_q.
// - hadamard: the cache's rows are rotated, as append_kv's.
// - parents: (Lq) or (B, Lq) int32, or packed as q is: the queries are those of the last keys and
//   form a tree. Each has the number of an earlier query of its sequence, or -1.
// - tree_mask: (Lq, Lq) or (B, Lq, Lq) bool, or packed (T, max_seqlen_q), instead of parents: which
//   of these keys a query sees, itself and earlier ones.
#define DECODE_OPTIONS(X)                     \
  X(OptionalTensor, cu_seqlens_q, None, STEP) \
  X(Integer, max_seqlen_q, 0, STEP)           \
  X(OptionalTensor, parents, None, STEP)      \
  X(OptionalTensor, tree_mask, None, STEP)    \
  X(Integer, hadamard, 0, STEP)

namespace metal_attn {

struct DecodeOptions {
  DECODE_OPTIONS(OPTION_FIELD)

  bool has_tree() const { return parents || tree_mask; }

  // The packing as attention takes it.
  std::optional<Packing> packing() const {
    return cu_seqlens_q ? std::optional(Packing{*cu_seqlens_q, None, max_seqlen_q, 0})
                        : std::nullopt;
  }
};

// The keys, or blocks of neighbouring keys, that each block of queries sees alone.
struct KeyLists {
  // (B or 1, Hkv or 1, lists, entries) int32; -1: none. Each row of packed queries has its list.
  OptionalTensor indices;
  int64_t kv_block_size = 1;
  int64_t q_block_size = 1;
};

struct FlashDecodeArguments {
  FlashFwdArguments forward;  // k and v are never packed
  int64_t num_splits;         // 0: chosen from the sizes and the GPU's cores
  KeyLists lists = {};
  DecodeOptions options = {};
};

// `append` as for append_kv, with cache_seqlens; its q is the queries if they are rotated. `decode`
// as for flash_decode over the caches of `append`, without lengths and tables of its own: those are
// cache_seqlens and the new keys, and rotary_cos and rotary_sin.
struct DecodeStepArguments {
  AppendKvArguments append;
  FlashDecodeArguments decode;
  bool counts_new_keys = false;  // cu_seqlens_k_new is given
};

}  // namespace metal_attn
