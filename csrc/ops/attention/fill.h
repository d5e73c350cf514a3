// Fills what every kernel of attention takes: the problem as params, the buffers that it reads, and
// the number of tiles.
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "shaders/params/attention.h"

namespace metal_attn {

// 0 along dimensions that the mask does not have, or has one element of.
MaskStrides mask_strides(const OptionalTensor& mask);

// Tiles of `tile` rows in `rows` rows of a head. With `ordered`, each block of a BlockMask, of
// `block` rows, has the same number of tiles, even if the rows end within the last block.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
