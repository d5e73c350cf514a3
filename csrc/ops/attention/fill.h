// The params and the input buffers of all kernels of attention, and their number of tiles.
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "shaders/params/attention.h"

namespace metal_attn {

// The strides are 0 in dimensions that the mask does not have or that have size 1.
MaskStrides mask_strides(const OptionalTensor& mask);

// The number of tiles of `tile` rows that cover `rows` rows. If `ordered`, each block of `block`
// rows of a BlockMask has the same number of tiles, even if the rows end within the last block.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
