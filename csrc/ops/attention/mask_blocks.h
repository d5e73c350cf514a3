// Lists of the blocks that a bool mask shows. One small kernel makes them, so that those of
// attention skip the others.
#pragma once

#include "csrc/ops/attention/flex.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// The tile of a kernel of attention, and the side along which it walks.
struct MaskTile {
  int queries;
  int keys;
  FlexWalk walk;
};

// A list for each tile: contiguous, int32, with a size of 1 where the mask broadcasts.
struct MaskBlocks {
  Tensor counts;   // (B or 1, H or 1, tiles or 1)
  Tensor entries;  // the same, and a last dimension: blocks
};

// True if this call has a bool mask, and blocks that it hides are skipped. It depends on shapes,
// strides and features alone.
bool skips_mask_blocks(const FlashFwdCall& call);

// Runs the kernel, for one of attention with these features; none if they are without lists.
std::optional<MaskBlocks> list_mask_blocks(const FlashFwdCall& call,
                                           const FlashFwdFeatures& features, const MaskTile& tile,
                                           Backend& backend);

// Binds the lists, if there are any, which must live until the launch has run.
void walk_along(const std::optional<MaskBlocks>& lists, Buffers& buffers, FlashParams& problem);

// One sentence on what is skipped, or why nothing is; "" without a bool mask.
std::string describe_mask_blocks(const FlashFwdCall& call, const MaskTile& tile);

}  // namespace metal_attn
