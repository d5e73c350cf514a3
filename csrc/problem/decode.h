// The arguments of the ops of decoding.
#pragma once

#include "csrc/problem/attention.h"

// The options that only decoding ops have: X(type, name, default, STEP).
// - cu_seqlens_q: (B + 1) int32. q and the new keys and values are packed rows (T, heads, columns).
// - max_seqlen_q: the maximal number of queries of a sequence, with cu_seqlens_q.
// - hadamard: the cache's rows were multiplied by a Hadamard matrix, as by append_kv.
// - parents: (Lq) or (B, Lq) int32, or packed like q. The queries belong to the last keys and form
//   a tree. Each entry is the number of an earlier query of the sequence, or -1.
// - tree_mask: (Lq, Lq) or (B, Lq, Lq) bool, or packed (T, max_seqlen_q), instead of parents. True
//   if the query sees the key. A query sees itself, and does not see later queries.
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

  std::optional<Packing> packing() const {
    return cu_seqlens_q ? std::optional(Packing{*cu_seqlens_q, None, max_seqlen_q, 0})
                        : std::nullopt;
  }
};

// Lists of the only keys, or blocks of neighbouring keys, that a block of queries sees.
struct KeyLists {
  // (B or 1, Hkv or 1, lists, entries) int32; -1: no entry. Each packed query has a list.
  OptionalTensor indices;
  int64_t kv_block_size = 1;
  int64_t q_block_size = 1;
};

struct FlashDecodeArguments {
  FlashFwdArguments forward;  // k and v are never packed
  int64_t num_splits;         // 0: chosen from the sizes and the number of GPU cores
  KeyLists lists = {};
  DecodeOptions options = {};
};

// append: as for append_kv, with cache_seqlens. append.q: the queries, if they are rotated. decode:
// as for flash_decode over the caches of `append`. Lengths and rotary tables are those of `append`.
struct DecodeStepArguments {
  AppendKvArguments append;
  FlashDecodeArguments decode;
  bool counts_new_keys = false;  // the caller passed cu_seqlens_k_new
};

}  // namespace metal_attn
