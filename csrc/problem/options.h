// The options of attention's ops, each once: the schemas, what the dispatcher hands over and the
// structs follow from the lists.
#pragma once

#include <string>
#include <vector>

#include "csrc/problem/cache.h"

// The types of the lists as schemas write them.
#define SCHEMA_Flag "bool"
#define SCHEMA_Integer "SymInt"
#define SCHEMA_Number "float"
#define SCHEMA_OptionalInteger "SymInt?"
#define SCHEMA_OptionalNumber "float?"
#define SCHEMA_OptionalTensor "Tensor?"

// X(type, name, default, whether decode_step has it), in the order of the schemas. What each means
// is in torch_metal_attn/reference.py, `attention`. The first are those that most calls have.
#define FLASH_FIRST_OPTIONS(X)                 \
  X(OptionalNumber, softmax_scale, None, STEP) \
  X(Flag, causal, False, STEP)                 \
  X(Integer, window_size_left, -1, STEP)       \
  X(Integer, window_size_right, -1, STEP)
#define FLASH_OPTIONS(X)                         \
  FLASH_FIRST_OPTIONS(X)                         \
  X(Integer, attention_chunk, 0, STEP)           \
  X(OptionalInteger, q_offset, None, NO_STEP)    \
  X(OptionalTensor, seqused_k, None, NO_STEP)    \
  X(OptionalTensor, leftpad_k, None, STEP)       \
  X(OptionalTensor, attn_mask, None, STEP)       \
  X(OptionalTensor, attn_bias, None, STEP)       \
  X(Number, softcap, 0.0, STEP)                  \
  X(OptionalTensor, alibi_slopes, None, STEP)    \
  X(OptionalTensor, learnable_sink, None, STEP)  \
  X(OptionalTensor, q_rotary_cos, None, NO_STEP) \
  X(OptionalTensor, q_rotary_sin, None, NO_STEP) \
  X(OptionalTensor, k_rotary_cos, None, NO_STEP) \
  X(OptionalTensor, k_rotary_sin, None, NO_STEP) \
  X(Flag, rotary_interleaved, False, NO_STEP)    \
  X(Number, dropout_p, 0.0, NO_STEP)             \
  X(OptionalTensor, rng_state, None, NO_STEP)

// X(type, name, default in the schema) of flex attention, in the order of the schemas, where
// `captures` and the softmax scale come first. A text is the body of a function in shaders/flex.h,
// or empty.
// - slope: the backward's.
// - kv_num_blocks: (B or 1, H or 1, blocks of queries) int32; kv_indices: the same and up to as
//   many blocks of keys. full_*: blocks that need no mask. q_*: the transposed lists, which the
//   backward needs.
// - kv_order, q_order: (2, B or 1, H or 1, rows of the lists) int32, all rows of lists in the order
//   in which they start, and each one's place in it. Of q_order, H counts the heads of keys.
// - q_block_size, kv_block_size: 0 without lists.
// - shares, places, share_captures, share_owners: of each load of a captured tensor that has a
//   gradient, the text of d score / d what is loaded, that of which element it is, the captured
//   tensor's number, and FlexOwner's bits.
#define FLEX_OPTIONS(X)                                    \
  X(Text, score, "str", "''")                              \
  X(Text, slope, "str", "''")                              \
  X(Text, mask, "str", "''")                               \
  X(OptionalTensor, kv_num_blocks, "Tensor?", "None")      \
  X(OptionalTensor, kv_indices, "Tensor?", "None")         \
  X(OptionalTensor, full_kv_num_blocks, "Tensor?", "None") \
  X(OptionalTensor, full_kv_indices, "Tensor?", "None")    \
  X(OptionalTensor, q_num_blocks, "Tensor?", "None")       \
  X(OptionalTensor, q_indices, "Tensor?", "None")          \
  X(OptionalTensor, full_q_num_blocks, "Tensor?", "None")  \
  X(OptionalTensor, full_q_indices, "Tensor?", "None")     \
  X(OptionalTensor, kv_order, "Tensor?", "None")           \
  X(OptionalTensor, q_order, "Tensor?", "None")            \
  X(Integer, q_block_size, "int", "0")                     \
  X(Integer, kv_block_size, "int", "0")                    \
  X(Texts, shares, "str[]?", "None")                       \
  X(Texts, places, "str[]?", "None")                       \
  X(Integers, share_captures, "int[]", "[]")               \
  X(Integers, share_owners, "int[]", "[]")

namespace metal_attn {

// The types of the lists; more are in cache.h.
using Integers = std::vector<int64_t>;
using Number = double;
using OptionalInteger = std::optional<int64_t>;
using OptionalNumber = std::optional<double>;
using Text = std::string;
using Texts = std::vector<std::string>;

struct FlashFwdOptions {
  FLASH_OPTIONS(OPTION_FIELD)
};

// The texts of score_mod and mask_mod, and the lists of a BlockMask.
struct FlexOptions {
  std::vector<Tensor> captures;  // what the texts index
#define FLEX_FIELD(TYPE, NAME, SCHEMA, DEFAULT) TYPE NAME = {};
  FLEX_OPTIONS(FLEX_FIELD)
#undef FLEX_FIELD
};

// Positions that index the captured tensor themselves, so that where they differ its elements do.
enum FlexOwner : int64_t { kOwnBatch = 1, kOwnHead = 2, kOwnQuery = 4, kOwnKey = 8 };

}  // namespace metal_attn
