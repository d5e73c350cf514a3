// The arguments of the ops of attention, and the problem that remains after the checks.
#pragma once

#include "csrc/problem/options.h"

namespace metal_attn {

// Concatenated sequences. Without cu_seqlens_k only the queries are concatenated, and k and v are
// dense tensors or a cache.
struct Packing {
  Tensor cu_seqlens_q;  // (B + 1) int32
  OptionalTensor cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
};

// q: (B, Hq, Lq, D), k: (B, Hkv, Lk, D), v: (B, Hkv, Lk, Dv), or packed (Tq, Hq, D), (Tk, Hkv, D),
// (Tk, Hkv, Dv), on one device. Hkv divides Hq, and the last strides are 1. All have one dtype,
// float32, float16 or bfloat16, or q has float32 and k and v half precision. CacheOptions allows
// more shapes and dtypes of k and v.
struct FlashFwdArguments {
  Tensor q;
  Tensor k;
  Tensor v;
  std::optional<Packing> packing;
  FlashFwdOptions options;
  CacheOptions cache;
  std::optional<FlexOptions> flex = std::nullopt;

  bool packs_keys() const { return packing && packing->cu_seqlens_k; }
};

struct FlashBwdArguments {
  Tensor dout;          // shape and dtype of out, last stride 1
  OptionalTensor dlse;  // shape of softmax_lse, float32, any strides
  Tensor out;           // the forward's results
  Tensor softmax_lse;
  bool exact_delta;  // out and softmax_lse are the results for exactly these keys
  FlashFwdArguments forward;
};

struct FlashBwdBiasArguments {
  Tensor dout;                 // shape and dtype of out, last stride 1
  Tensor softmax_lse;          // a result of the forward
  Tensor delta;                // a result of flash_bwd
  OptionalTensor normalisers;  // a result of flash_bwd
  FlashFwdArguments forward;
};

// Rotary tables that are applied while q or k is loaded.
struct FusedRotary {
  Element element;  // of the tables
  int first;        // the first rotated column
  int dim;          // rotated columns
  bool interleaved;
  bool q;        // q is rotated
  bool k;        // k is rotated
  bool aligned;  // every row of every table is 16-byte aligned

  bool operator==(const FusedRotary&) const = default;
};

// A bool mask or a bias.
struct MaskOperand {
  Element element;  // of a bias
  bool pairs;       // two neighbouring keys lie in one aligned vector

  bool operator==(const MaskOperand&) const = default;
};

// The functions of shaders/flex.h as texts. Equal texts have one address, which is valid until the
// process ends. Null: there is no such function.
struct FlexFeatures {
  const char* captures;  // declarations of the captured tensors
  const char* score;
  const char* slope;
  const char* mask;
  const char* share;
  const char* place;
  int q_block;  // block size of a BlockMask, or 0
  int kv_block;
  bool full_blocks;  // a second list has the blocks that need no mask_mod
  bool ordered;      // threadgroups start in the order of a tensor

  bool operator==(const FlexFeatures&) const = default;
};

// X(feature, define, IN_KEY or NO_KEY): the boolean features. A feature that changes the
// work or the registers of a kernel is IN_KEY: the key of a tuned tile contains its name.
// - band: a window or the diagonal hides some key from some query.
// - chunk: a query sees only keys of its chunk.
// - varlen: queries and keys are packed. packed_q: only queries are packed.
// - tree_parents, tree_mask: `parents` or `tree_mask` of flash_decode hides new tokens.
// - mask_blocks: tiles skip blocks that the mask hides.
// - long_offsets: some tensor ends past 2^31 elements.
#define FLASH_FLAGS(X)                  \
  X(band, BAND, NO_KEY)                 \
  X(chunk, CHUNKED, NO_KEY)             \
  X(varlen, VARLEN, NO_KEY)             \
  X(packed_q, PACKED_Q, NO_KEY)         \
  X(tree_parents, TREE_PARENTS, NO_KEY) \
  X(tree_mask, TREE_MASK, NO_KEY)       \
  X(seqused_k, SEQUSED_K, NO_KEY)       \
  X(leftpad_k, LEFTPAD_K, NO_KEY)       \
  X(mask_blocks, MASK_BLOCKS, NO_KEY)   \
  X(long_offsets, LONG_OFFSETS, NO_KEY) \
  X(softcap, SOFTCAP, IN_KEY)           \
  X(alibi, ALIBI, NO_KEY)               \
  X(dropout, DROPOUT, IN_KEY)

// Features that are compiled in only if a call needs them.
struct FlashFwdFeatures {
#define FLAG_FIELD(NAME, DEFINE, KEY) bool NAME = false;
  FLASH_FLAGS(FLAG_FIELD)
#undef FLAG_FIELD
  std::optional<MaskOperand> mask;
  std::optional<MaskOperand> bias;
  std::optional<Element> sink;
  std::optional<FusedRotary> rotary;
  CacheFeatures cache;
  std::optional<FlexFeatures> flex;

  bool packs_queries() const { return varlen || packed_q; }

  // True if a lane loads its two keys of the mask or the bias separately.
  bool unpaired_keys() const { return (mask && !mask->pairs) || (bias && !bias->pairs); }

  bool has_tree() const { return tree_parents || tree_mask; }

  // The block sizes of a BlockMask, or 0. Tiles must divide them.
  int q_block() const { return flex ? flex->q_block : 0; }
  int kv_block() const { return flex ? flex->kv_block : 0; }
  bool ordered() const { return flex && flex->ordered; }

  bool operator==(const FlashFwdFeatures&) const = default;
};

// With fewer rows the overhead of a launch dominates, and the tile does not matter.
inline constexpr int64_t kManyRows = 512;

// The properties of a call on which the choice of a kernel depends.
struct FlashFwdProblem {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool aligned;        // rows of k and v are aligned to kv_load_bytes
  bool q_pairs;        // columns 2i and 2i + 1 of q lie in one aligned vector
  bool q_aligned;      // rows of q are 16-byte aligned
  int64_t keys;        // of all heads and sequences; 0 if sequences have fewer than kManyRows
  int64_t q_length;    // packed: the maximum
  int queries_per_kv;  // query heads that share a KV head
  FlashFwdFeatures features;

  bool operator==(const FlashFwdProblem&) const = default;
};

// A checked call of flash_fwd or flash_varlen_fwd.
struct FlashFwdCall {
  FlashFwdProblem problem;
  int32_t batch;  // sequences
  int32_t heads;
  int32_t kv_heads;
  int32_t q_length;   // packed: the maximum
  int32_t kv_length;  // packed: the maximum
  int32_t q_total;    // packed: rows of q
  int32_t kv_total;   // packed: rows of k; with a cache: the capacity for a sequence
  double scale;
  OptionalTensor mask;  // a bool attn_mask
  OptionalTensor bias;  // attn_bias or a floating attn_mask

  // The number of queries of all sequences.
  int64_t queries() const {
    return problem.features.packs_queries() ? q_total : int64_t{batch} * q_length;
  }
  bool launches() const { return heads > 0 && queries() > 0; }
};

}  // namespace metal_attn
