// The blocks that a tile visits: all blocks that it may see, or those in the lists of a BlockMask,
// of mask_blocks.metal (MASK_BLOCKS), or of keys or small blocks (INDICES).
#pragma once

#include "inputs.h"
#include "params/mask_blocks.h"

// The rows of a listed block of queries and of keys.
#define LIST_Q_BLOCK listed_rows(BLOCK_Q, FLEX_Q_BLOCK)
#define LIST_KV_BLOCK listed_rows(BLOCK_K, FLEX_KV_BLOCK)

constexpr int listed_rows(int tile_rows, int flex_rows) {
  return INDICES ? INDEX_BLOCK : FLEX_Q_BLOCK && !MASK_BLOCKS ? flex_rows : tile_rows;
}

// With INDICES, the row at a place without a visible key, and in a block that does not exist.
constant constexpr int NO_ROW = -1;
constant constexpr int IMPOSSIBLE_ROW = INT_MAX;
constant constexpr int NO_ENTRY = -1;  // an entry that lists nothing

// One list in the caller's memory. Nothing outside of the list is read.
struct BlockList {
  const device int* entries;
  Offset first;
  Offset stride;
  int count;
  bool impossible;

  METAL_FUNC void reset(const device int* counts, const device int* indices,
                        constant BlockListParams& params, int batch, int head, int list) thread {
    entries = indices;
    first = Offset(batch) * Offset(params.index_strides.batch) +
            Offset(head) * Offset(params.index_strides.head) +
            Offset(list) * Offset(params.index_strides.query);
    stride = Offset(params.index_strides.key);
    const int listed =
        INDICES ? params.longest : counts[row_offset(params.count_strides, batch, head, list)];
    count = clamp(listed, 0, params.longest);
    impossible = count != listed;
  }

  METAL_FUNC int entry(int place) const thread { return entries[first + Offset(place) * stride]; }
};

// A tile's blocks of BLOCK keys (or queries): first the blocks that mask_mod is applied to, then
// the full blocks. With MASK_BLOCKS one ascending list has both, so that sums keep their order.
// Listed blocks that do not exist are skipped and set `impossible`. Uniform in the threadgroup.
template <int BLOCK>
struct ListedBlocks {
  BlockList partial;
  BlockList full;  // FLEX_FULL_BLOCKS
  int count;       // entries of both lists
  int rows;        // one past the last key (or query)
  Range seen;      // visible keys (INDICES)
  int existing;    // blocks that exist (INDICES)
  int next_entry;
  int end;      // of the current block
  bool masked;  // whether attn_mask or mask_mod is applied to the current block
  bool done;
  bool impossible;

  METAL_FUNC void reset(thread const FlashInputs& inputs, constant FlexParams& params, int batch,
                        int head, int list, Range other_rows) thread {
    partial.reset(inputs.block_counts, INDICES ? inputs.indices : inputs.block_indices,
                  params.partial, batch, head, list);
    count = partial.count;
    impossible = partial.impossible;
    if (FLEX_FULL_BLOCKS) {
      full.reset(inputs.full_block_counts, inputs.full_block_indices, params.full, batch, head,
                 list);
      count += full.count;
      impossible = impossible || full.impossible;
    }
    rows = other_rows.end;
    if (INDICES) {
      seen = other_rows;
      existing = params.existing_blocks;
      // Keys that do not exist are read as key 0, which must exist.
      count = seen.begin < seen.end ? count : 0;
    }
  }

  // The places of all rows in the listed blocks, concatenated.
  METAL_FUNC Range places() const thread { return {0, count * BLOCK}; }

  // The first row of a tile that begins at `place`; at least `rows` if the tile does not exist.
  // With INDICES this is the place itself, and `row` looks up each row.
  METAL_FUNC int row_at(int place) thread {
    if (INDICES) { return place; }
    next_entry = place / BLOCK;
    const int first_row = next_block();
    return done ? rows : first_row + place % BLOCK;
  }

  // The row at a place that row_at has returned, or at a later place of the same tile.
  METAL_FUNC int row(int place) const thread {
    if (!INDICES) { return place; }
    const int entry = place < count * BLOCK ? partial.entry(uint(place) / BLOCK) : NO_ENTRY;
    if (entry < NO_ENTRY || entry >= existing) { return IMPOSSIBLE_ROW; }
    const int row = entry * BLOCK + int(uint(place) % BLOCK);
    return row >= seen.begin && row < seen.end ? row : NO_ROW;
  }

  // The first row of the first block. Sets `done` if there is no block.
  METAL_FUNC int first() thread {
    next_entry = 0;
    return next_block();
  }

  // `row`, or the first row of the next block if `row` is past the current one.
  METAL_FUNC int next(int row) thread { return row < end ? row : next_block(); }

  METAL_FUNC int next_block() thread {
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    done = false;
    while (next_entry < count) {
      masked = next_entry < partial.count;
      int block = masked ? partial.entry(next_entry) : full.entry(next_entry - partial.count);
      if (MASK_BLOCKS) {
        masked = mask_block_is_partial(block);
        block = mask_block_of(block);
      }
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

// All visible rows, from the beginning of the block that has the first visible row.
template <int BLOCK>
struct AllBlocks {
  Range seen;
  bool masked;
  bool done;
  bool impossible;

  METAL_FUNC void reset(thread const FlashInputs&, constant FlexParams&, int, int, int,
                        Range other_rows) thread {
    seen = other_rows;
    seen.begin = seen.begin / BLOCK * BLOCK;
    masked = true;
    impossible = false;
  }

  METAL_FUNC Range places() const thread { return seen; }
  METAL_FUNC int row_at(int place) const thread { return place; }
  METAL_FUNC int row(int place) const thread { return place; }
  METAL_FUNC int first() thread { return next(seen.begin); }

  METAL_FUNC int next(int row) thread {
    done = row >= seen.end;
    return row;
  }
};

template <int BLOCK>
using Blocks = conditional_t<BLOCK_LISTS || INDICES, ListedBlocks<BLOCK>, AllBlocks<BLOCK>>;
