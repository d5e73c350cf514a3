// A small kernel lists the blocks of scores that a bool mask does not hide completely. The kernels
// of attention compute only these blocks.
#pragma once

#include "csrc/ops/attention/flex.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// The tile of a kernel of attention, and the side over which the kernel loops.
struct MaskTile {
  int queries;
  int keys;
  FlexWalk walk;
};

// A list of blocks for each tile. Both are int32 and contiguous. Broadcast dimensions have size 1.
struct MaskBlocks {
  Tensor counts;   // (B or 1, H or 1, tiles or 1)
  Tensor entries;  // (B or 1, H or 1, tiles or 1, blocks)
};

// True if the call skips blocks that a bool mask hides, by its shapes, strides and features.
bool skips_mask_blocks(const FlashFwdCall& call);

// Runs the kernel that lists blocks if the features include mask_blocks.
std::optional<MaskBlocks> list_mask_blocks(const FlashFwdCall& call,
                                           const FlashFwdFeatures& features, const MaskTile& tile,
                                           Backend& backend);

// Binds the lists, which must live until the launch has run.
void bind_mask_blocks(const std::optional<MaskBlocks>& lists, Buffers& buffers,
                      FlashParams& problem);

// One sentence about the skipped blocks, or why none are skipped. "" without a bool mask.
std::string describe_mask_blocks(const FlashFwdCall& call, const MaskTile& tile);

}  // namespace metal_attn
