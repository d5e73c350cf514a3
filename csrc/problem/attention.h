// The arguments of the ops of attention, and the problem that remains after the checks.
#pragma once

#include "csrc/problem/options.h"

namespace metal_attn {

// Sequences packed one after the other. Without cu_seqlens_k only their queries are: k and v are
// dense, or a cache.
struct Packing {
  Tensor cu_seqlens_q;  // (B + 1) int32
  OptionalTensor cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
};

// q: (B, Hq, Lq, D), k: (B, Hkv, Lk, D), v: (B, Hkv, Lk, Dv), or packed (Tq, Hq, D), (Tk, Hkv, D),
// (Tk, Hkv, Dv); alike in device and in dtype: float32, float16 or bfloat16; or k and v in half
// precision and q in float32. Hkv divides Hq, and the last strides are 1. Of a cache, k and v may
// differ: see CacheOptions.
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
  Tensor dout;          // of out's shape and dtype, last stride 1
  OptionalTensor dlse;  // of softmax_lse's shape, float32, any strides
  Tensor out;           // the forward's results
  Tensor softmax_lse;
  bool exact_delta;  // out and softmax_lse are of exactly these keys, so delta can be checked
  FlashFwdArguments forward;
};

struct FlashBwdBiasArguments {
  Tensor dout;                 // of out's shape and dtype, last stride 1
  Tensor softmax_lse;          // the forward's
  Tensor delta;                // flash_bwd's
  OptionalTensor normalisers;  // the same
  FlashFwdArguments forward;
};

// Rotary tables that are applied while q or k is loaded.
struct FusedRotary {
  Element element;  // of the tables
  int first;        // column that is rotated
  int dim;          // columns that are rotated
  bool interleaved;
  bool q;
  bool k;
  bool aligned;  // every row of every table is 16-byte aligned

  bool operator==(const FusedRotary&) const = default;
};

// A bool mask, or a bias.
struct MaskOperand {
  Element element;  // of a bias
  bool pairs;       // two neighbouring keys can be read as one aligned vector

  bool operator==(const MaskOperand&) const = default;
};

// Texts of shaders/flex.h that live as long as the process, each once, and null where there are
// none.
struct FlexFeatures {
  const char* captures;  // their declarations
  const char* score;
  const char* slope;
  const char* mask;
  const char* share;
  const char* place;
  int q_block;  // of a BlockMask, or 0
  int kv_block;
  bool full_blocks;  // some are listed apart, without mask_mod
  bool ordered;      // threadgroups start in an order that is given

  bool operator==(const FlexFeatures&) const = default;
};

// X(feature, its define, IN_KEY or NO_KEY): those that are on or off. The key of a tuned tile has
// those that change a kernel's work or registers, as a word of this name; it has band and chunk as
// one word.
// - band: a window or the diagonal hides some key from some query.
// - chunk: queries see their own chunk.
// - varlen: queries and keys are packed; packed_q: queries alone.
// - tree_parents, tree_mask: what says which new tokens a query of flash_decode sees.
// - mask_blocks: tiles walk along the blocks that the mask shows; no problem differs by it.
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

// The features that are compiled in only if a call needs them.
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

  // True if q has the rows of all sequences.
  bool packs_queries() const { return varlen || packed_q; }

  // True if a lane's two keys of a mask or of a bias are loaded one by one.
  bool unpaired_keys() const { return (mask && !mask->pairs) || (bias && !bias->pairs); }

  bool has_tree() const { return tree_parents || tree_mask; }

  // Rows of a BlockMask's blocks, which tiles must divide; any tile divides 0.
  int q_block() const { return flex ? flex->q_block : 0; }
  int kv_block() const { return flex ? flex->kv_block : 0; }
  bool ordered() const { return flex && flex->ordered; }

  bool operator==(const FlashFwdFeatures&) const = default;
};

// With fewer rows the time is a launch's, whatever the tile.
inline constexpr int64_t kManyRows = 512;

// The properties of a call on which the choice of a kernel depends.
struct FlashFwdProblem {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool aligned;        // every row of k and v is aligned to its loads, see kv_load_bytes
  bool q_pairs;        // columns 2i and 2i + 1 of q lie in one aligned vector
  bool q_aligned;      // every row of q is 16-byte aligned
  int64_t keys;        // of all heads and sequences, if a sequence has kManyRows or more; or else 0
  int64_t q_length;    // packed: at most, of any sequence
  int queries_per_kv;  // query heads that share a KV head
  FlashFwdFeatures features;

  bool operator==(const FlashFwdProblem&) const = default;
};

// One call of flash_fwd or flash_varlen_fwd, checked.
struct FlashFwdCall {
  FlashFwdProblem problem;
  int32_t batch;  // sequences
  int32_t heads;
  int32_t kv_heads;
  int32_t q_length;   // packed: at most, of any sequence
  int32_t kv_length;  // packed: at most, of any sequence
  int32_t q_total;    // packed: rows of q
  int32_t kv_total;   // of a cache: keys that a sequence may have
  double scale;
  // The two that options.attn_mask may be.
  OptionalTensor mask;
  OptionalTensor bias;

  // The queries of all sequences.
  int64_t queries() const {
    return problem.features.packs_queries() ? q_total : int64_t{batch} * q_length;
  }
  bool launches() const { return heads > 0 && queries() > 0; }
};

}  // namespace metal_attn
