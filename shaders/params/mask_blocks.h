// Parameters of mask_blocks, which lists the blocks that a bool mask does not mask out.
#pragma once

#include "common.h"

// An entry of a list of mask_blocks: a block, and whether attn_mask hides part of it.
constexpr int mask_block_entry(int block, bool is_partial) {
  return 2 * block + (is_partial ? 1 : 0);
}
constexpr int mask_block_of(int entry) { return entry / 2; }
constexpr bool mask_block_is_partial(int entry) { return entry % 2 != 0; }

enum MaskBlocksBuffer {
  MASK_BLOCKS_MASK = 0,
  MASK_BLOCKS_COUNTS = 1,
  MASK_BLOCKS_ENTRIES = 2,
  MASK_BLOCKS_PARAMS = 3,
};

// The number of SIMD groups in a threadgroup of mask_blocks.
#define MASK_BLOCKS_SIMDGROUPS 8

// A dimension with stride 0 broadcasts. `inner` is the side along which a lane reads words. A list
// has blocks along one side, and each block of the other side has a list.
struct MaskBlocksParams {
  int64_t batch_stride;
  int64_t head_stride;
  int64_t outer_stride;
  int64_t inner_stride;
  int32_t outer_length;
  int32_t inner_length;
  int32_t outer_block;
  int32_t inner_block;
  int32_t along_inner;  // 1: a list has the blocks along inner; 0: along outer
  int32_t blocks;       // the maximum number of blocks of a list
};
