// Lists of the options of attention's ops. Macros generate the schemas, the parameters of
// the dispatcher's functions and the structs from these lists.
#pragma once

#include <string>
#include <vector>

#include "csrc/problem/cache.h"

// The types of the lists in schemas.
#define SCHEMA_Flag "bool"
#define SCHEMA_Integer "SymInt"
#define SCHEMA_Number "float"
#define SCHEMA_OptionalInteger "SymInt?"
#define SCHEMA_OptionalNumber "float?"
#define SCHEMA_OptionalTensor "Tensor?"

// X(type, name, default, STEP if decode_step has the option or NO_STEP), in the order of the
// schemas. `attention` in torch_metal_attn/reference.py explains the options.
// FLASH_FIRST_OPTIONS are the options that most calls use.
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

// The options of flex attention: X(type, name, type in the schema, default in the schema), in the
// order of the schemas, after `captures` and the softmax scale. A text is the body of a function in
// shaders/flex.h, or empty.
// - slope: the derivative of score, for the backward.
// - kv_num_blocks: (B or 1, H or 1, blocks of queries) int32. kv_indices has one dimension more, up
//   to the number of blocks of keys. full_*: blocks that need no mask. q_*: the transposed lists,
//   which the backward needs.
// - kv_order, q_order: (2, B or 1, H or 1, rows of the lists) int32: the order in which the rows of
//   the lists start, and each row's place in that order. In q_order, H is the number of KV heads.
// - q_block_size, kv_block_size: 0 without lists.
// - shares, places, share_captures, share_owners have an entry for each load of a captured tensor
//   that has a gradient: the text of d score / d loaded element, the text of the element's
//   position, the number of the captured tensor, and bits of FlexOwner.
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

// Types of the lists; cache.h has more.
using Integers = std::vector<int64_t>;
using Number = double;
using OptionalInteger = std::optional<int64_t>;
using OptionalNumber = std::optional<double>;
using Text = std::string;
using Texts = std::vector<std::string>;

struct FlashFwdOptions {
  FLASH_OPTIONS(OPTION_FIELD)
};

struct FlexOptions {
  std::vector<Tensor> captures;  // tensors that the texts index
#define FLEX_FIELD(TYPE, NAME, SCHEMA, DEFAULT) TYPE NAME = {};
  FLEX_OPTIONS(FLEX_FIELD)
#undef FLEX_FIELD
};

// Indices of a score that directly index the captured tensor: scores that differ in one of them
// load different elements.
enum FlexOwner : int64_t { kOwnBatch = 1, kOwnHead = 2, kOwnQuery = 4, kOwnKey = 8 };

}  // namespace metal_attn
