// metal_attn::flash_decode: attention of few queries over long caches, split over the keys.
#pragma once

#include <tuple>

#include "csrc/problem/decode.h"
#include "csrc/runtime/backend.h"
#include "csrc/tiles/flash_decode.h"
#include "shaders/params/append.h"

namespace metal_attn {

// Like flash_fwd, without dropout and without rotation of k.
std::tuple<Tensor, Tensor> flash_decode(const FlashDecodeArguments& arguments, Backend& backend);

// metal_attn::flash_fwd, flash_varlen_fwd and flex_fwd. flash_decode's kernel runs for few queries,
// and for more of them over many keys if splits save time.
std::tuple<Tensor, Tensor> attention_fwd(const FlashFwdArguments& arguments, Backend& backend);

// The most rows of a KV head, so that the kernel's row numbers do not exceed int32.
inline constexpr int64_t kMaxRows = int64_t{1} << 30;

FlashFwdCall check_flash_decode(const FlashDecodeArguments& arguments);

// A checked call of flash_decode or decode_step, and the kernel that was chosen for it.
struct FlashDecodeCall {
  FlashFwdCall forward;
  KeyLists lists;
  DecodeOptions options;
  FlashDecodeSpecialisation specialisation;
  int64_t keys;  // the most that the queries of a sequence, or of a list, read
  int64_t splits;
  int64_t row_groups;  // threadgroups that share the rows of a KV head
  std::array<uint32_t, 3> threadgroups;

  // The most rows with one list of keys. A row is a query of one of the heads that share a KV head.
  int64_t list_rows() const {
    const int64_t queries = lists.indices ? list_queries() : std::max<int64_t>(forward.q_length, 1);
    return queries * (forward.heads / forward.kv_heads);
  }
  int64_t list_count() const {
    return lists.indices ? divide_up(forward.q_length, list_queries()) : 1;
  }

 private:
  int64_t list_queries() const { return std::min<int64_t>(lists.q_block_size, forward.q_length); }
};

// New keys and values that the launch appends first.
struct FlashDecodeAppend {
  Defines defines;
  Tensor k;
  Tensor v;
  OptionalTensor cu_seqlens_k_new;
  AppendParams params;
  bool rotate_q_by_token;
};

// forward: checked. appends: the launch writes new keys first. Chooses nothing without a launch.
FlashDecodeCall choose_flash_decode(const FlashFwdCall& forward,
                                    const FlashDecodeArguments& arguments, bool appends);

// Runs a checked call, which may append new rows first.
std::tuple<Tensor, Tensor> run(const FlashDecodeCall& call, const FlashFwdArguments& arguments,
                               const FlashDecodeAppend* append, Backend& backend);

}  // namespace metal_attn
