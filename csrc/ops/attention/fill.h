// What every kernel of attention is given: the problem as params, the buffers that it reads, and
// how many tiles.
#pragma once

#include <optional>

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

// 0 along dimensions that the mask does not have, or has one element of.
MaskStrides mask_strides(const OptionalTensor& mask);

// Tiles of `tile` rows of a head, in `rows` of them. In a given order every block of a BlockMask,
// of `block` rows, has as many, even if the last block ends before them.
inline int64_t tiles_of(int64_t rows, int64_t tile, int block, bool ordered) {
  return ordered ? (rows + block - 1) / block * (block / tile) : (rows + tile - 1) / tile;
}

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& arguments);

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& arguments);

}  // namespace metal_attn
