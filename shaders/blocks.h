// The blocks that a tile walks along, in place of everything that it may see: those that a
// BlockMask lists, or with MASK_BLOCKS those that mask_blocks.metal has listed.
#pragma once

#include "inputs.h"

// Rows of a listed block on both sides.
#if MASK_BLOCKS
#define LIST_Q_BLOCK BLOCK_Q
#define LIST_KV_BLOCK BLOCK_K
#elif BLOCK_LISTS
#define LIST_Q_BLOCK FLEX_Q_BLOCK
#define LIST_KV_BLOCK FLEX_KV_BLOCK
#endif

// Whether attn_mask or mask_mod is applied to the block that a kernel is in.
#if BLOCK_LISTS
#define BLOCK_MASKED listed.masked
#else
#define BLOCK_MASKED true
#endif

#if BLOCK_LISTS
// One list, which comes from the caller's memory: nothing outside of it is read.
struct BlockList {
  const device int* entries;
  int64_t stride;
  int count;
  bool impossible;

  METAL_FUNC void reset(const device int* counts, const device int* indices,
                        constant BlockListParams& params, int batch, int head, int list) thread {
    entries = indices + batch * params.index_strides.batch + head * params.index_strides.head +
              list * params.index_strides.query;
    stride = params.index_strides.key;
    const int given = counts[batch * params.count_strides.batch + head * params.count_strides.head +
                             list * params.count_strides.row];
    count = clamp(given, 0, params.longest);
    impossible = count != given;
  }
};

// A tile's blocks of BLOCK rows of the other side: those that mask_mod is applied to, then full
// ones. With MASK_BLOCKS one ascending list has both, so that a row's sums keep their order. Blocks
// that do not exist are `impossible`, and skipped. Uniform in the threadgroup.
template <int BLOCK>
struct ListedBlocks {
  BlockList partial;
#if FLEX_FULL_BLOCKS
  BlockList full;
#endif
  int count;  // of both lists
  int rows;   // of the other side
  int next_entry;
  int end;      // of the block that the walk is in
  bool masked;  // see BLOCK_MASKED
  bool done;
  bool impossible;

  METAL_FUNC void reset(thread const FlashInputs& inputs, constant FlexParams& params, int batch,
                        int head, int list, int other_rows) thread {
    partial.reset(inputs.block_counts, inputs.block_indices, params.partial, batch, head, list);
    count = partial.count;
    impossible = partial.impossible;
#if FLEX_FULL_BLOCKS
    full.reset(inputs.full_block_counts, inputs.full_block_indices, params.full, batch, head, list);
    count += full.count;
    impossible = impossible || full.impossible;
#endif
    rows = other_rows;
  }

  // The walk's first row, unless it is `done` already.
  METAL_FUNC int first() thread {
    next_entry = 0;
    return next_block();
  }

  // `row`, or the first row of the next block where this one ends before it.
  METAL_FUNC int next(int row) thread { return row < end ? row : next_block(); }

  // The row at `place` of the listed blocks, one after the other; not below `rows` where it does
  // not exist.
  METAL_FUNC int row_at(int place) thread {
    next_entry = place / BLOCK;
    const int first_row = next_block();
    return done ? rows : first_row + place % BLOCK;
  }

  METAL_FUNC int next_block() thread {
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    done = false;
    while (next_entry < count) {
#if MASK_BLOCKS
      const int entry = partial.entries[next_entry * partial.stride];
      const int block = mask_block_of(entry);
      masked = mask_block_is_partial(entry);
#else
      masked = next_entry < partial.count;
#if FLEX_FULL_BLOCKS
      const int block = masked ? partial.entries[next_entry * partial.stride]
                               : full.entries[(next_entry - partial.count) * full.stride];
#else
      const int block = partial.entries[next_entry * partial.stride];
#endif
#endif
      next_entry++;
      if (block >= 0 && block < blocks) {
        end = min(block * BLOCK + BLOCK, rows);
        return block * BLOCK;
      }
      impossible = true;
    }
    done = true;
    return 0;
  }
};
#endif
