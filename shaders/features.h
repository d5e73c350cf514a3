// Features of the kernels. The host defines features that are on as 1. Features that are off become
// constants that are false, so that `if (SOFTCAP)` compiles in both cases.
#pragma once

// IS_ON is 1 if the macro `feature` is 1, else 0. IS_DEFINED is 1 if it is 0 or 1, else 0.
// FEATURE_IF_1 inserts an argument, which makes the literal 1 the second one.
#define FEATURE_IF_1 0,
#define FEATURE_IF_DEFINED_0 0,
#define FEATURE_IF_DEFINED_1 0,
#define FEATURE_SECOND(first, second, ...) second
#define FEATURE_MATCHES(match) FEATURE_SECOND(match 1, 0, 0)
#define FEATURE_VALUE_IS_1(value) FEATURE_MATCHES(FEATURE_IF_##value)
#define FEATURE_VALUE_IS_DEFINED(value) FEATURE_MATCHES(FEATURE_IF_DEFINED_##value)
#define IS_ON(feature) FEATURE_VALUE_IS_1(feature)
#define IS_DEFINED(feature) FEATURE_VALUE_IS_DEFINED(feature)

// WHEN expands to its other arguments if the feature is on, UNLESS if it is off. They are for
// parameters, fields and types, which cannot be in an `if`.
#define FEATURE_KEEP_1(...) __VA_ARGS__
#define FEATURE_KEEP_0(...)
#define FEATURE_DROP_1(...)
#define FEATURE_DROP_0(...) __VA_ARGS__
#define FEATURE_JOIN_AS_IS(a, b) a##b
#define FEATURE_JOIN(a, b) FEATURE_JOIN_AS_IS(a, b)
#define WHEN(feature, ...) FEATURE_JOIN(FEATURE_KEEP_, IS_ON(feature))(__VA_ARGS__)
#define UNLESS(feature, ...) FEATURE_JOIN(FEATURE_DROP_, IS_ON(feature))(__VA_ARGS__)

// An array in threadgroup memory, or a null pointer if the feature is off.
#define THREADGROUP_ARRAY(feature, type, name, ...)  \
  WHEN(feature, threadgroup type name[__VA_ARGS__];) \
  UNLESS(feature, threadgroup type* const name = nullptr;)

// Numbers that default to 0 and, if the host defines them, turn on a feature.
#ifdef PAGE_SIZE
#define PAGED 1
#else
#define PAGE_SIZE 0
#endif
#ifdef KV_FORMAT
#define QUANTISED 1
#else
#define KV_FORMAT 0
#endif
#ifndef V_FORMAT
#define V_FORMAT KV_FORMAT
#endif
#ifndef FLEX_Q_BLOCK
#define FLEX_Q_BLOCK 0
#define FLEX_KV_BLOCK 0
#endif
// The queries of all sequences are packed rows. With VARLEN the keys are packed rows, too.
#if VARLEN
#define PACKED_Q 1
#endif
#ifdef INDEX_BLOCK
#define INDICES 1
#else
#define INDEX_BLOCK 0
#endif
// A sequence's new tokens form a tree (tree.h).
#if TREE_PARENTS || TREE_MASK
#define TREE 1
#endif
// Tiles visit the blocks of lists (blocks.h).
#if FLEX_Q_BLOCK || MASK_BLOCKS
#define BLOCK_LISTS 1
#endif
// The derivative of score_mod is not the constant 1.
#ifdef FLEX_SLOPE
#define FLEX_DERIVATIVES 1
#endif

#define FEATURE(name) \
  FEATURE_JOIN(FEATURE_DROP_, IS_DEFINED(name))(constant constexpr bool name = false;)

// Features of sequences, and of the keys that are visible.
FEATURE(VARLEN)
FEATURE(PACKED_Q)
FEATURE(SEQUSED_K)
FEATURE(LEFTPAD_K)
FEATURE(CACHE_BATCH_IDX)
FEATURE(BAND)     // a window, which may be causal
FEATURE(CHUNKED)  // a query sees only keys of its own chunk
FEATURE(MASK)
FEATURE(MASK_PAIRS)  // columns 2i and 2i + 1 are one aligned vector (MaskRows)
FEATURE(MASK_BLOCKS)
// Scores and weights.
FEATURE(FLEX_DERIVATIVES)
FEATURE(SOFTCAP)
// d score / d product is not constant, and the backward multiplies by it.
constant constexpr bool SCORE_DERIVATIVES = SOFTCAP || FLEX_DERIVATIVES;
FEATURE(ALIBI)
FEATURE(BIAS)
FEATURE(BIAS_PAIRS)  // columns 2i and 2i + 1 are one aligned vector (MaskRows)
FEATURE(SINK)
FEATURE(DROPOUT)
FEATURE(FLEX)
FEATURE(FLEX_FULL_BLOCKS)
FEATURE(FLEX_ORDER)
FEATURE(BLOCK_LISTS)
FEATURE(INDICES)  // lists of keys, or of blocks of INDEX_BLOCK keys, in any order
// Rows of q, k and v.
FEATURE(Q_ROTARY)
FEATURE(K_ROTARY)
FEATURE(NEW_K_ROTARY)  // keys are rotated before they are written to a cache
FEATURE(WIDE_ROTARY)
FEATURE(ROTARY_INTERLEAVED)
FEATURE(PAGED)
FEATURE(QUANTISED)
FEATURE(K_SCALE)
FEATURE(V_SCALE)
FEATURE(WIDE_LOADS)    // rows are aligned to 16 bytes
FEATURE(LONG_OFFSETS)  // offsets in elements need more than 32 bits
FEATURE(ROW_PAIRS)     // columns 2i and 2i + 1 are one aligned vector (OperandTile)
FEATURE(ROWS_IN_THREADGROUP)
FEATURE(TENSOR_TILES)  // tiles are laid out for tensor operations (tensor_tile.h)
// The decoding kernels.
FEATURE(APPEND)
FEATURE(PACKED_NEW_K)  // the new rows of all sequences are packed
FEATURE(TREE)
FEATURE(TREE_PARENTS)
FEATURE(TREE_MASK)
FEATURE(SPLIT)
FEATURE(ROW_LOOP)  // a threadgroup has more than one tile of rows
FEATURE(V_IN_K)
// The backward kernels.
FEATURE(DLSE)
FEATURE(EXACT_DELTA)
FEATURE(NORMALISED)
FEATURE(TILES_SHARED)  // two tiles of wide rows use one array, one after the other
FEATURE(ALIBI_SLOPE_GRADIENT)
FEATURE(QUERIES_OWNED)
FEATURE(PLACES_DIFFER)
