// Grids of tiles, and the most work that kernels of attention may have: long launches are divided
// by it (csrc/runtime/pieces.h).
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// The rows that tiles cover, those of q or of k.
struct GridRows {
  const char* name;
  int64_t length;
  int64_t heads;
  int64_t parts;  // threadgroups for each tile
};

struct GridTiles {
  int64_t rows;
  int listed_rows;  // of a BlockMask's blocks, or 0
  bool ordered;
  int threads;
};

// A threadgroup for each tile, part, head and sequence. Throws std::invalid_argument for a grid
// that Metal cannot count.
Extent check_grid(const FlashFwdCall& call, const GridRows& rows, const GridTiles& tiles);

// Keys of one sequence that some of `queries` neighbouring queries see, at most.
int64_t keys_seen(const FlashFwdArguments& arguments, const FlashFwdCall& call, int64_t queries);

// Queries of one sequence that see some of `keys` neighbouring keys, at most.
int64_t queries_seeing(const FlashFwdArguments& arguments, const FlashFwdCall& call, int64_t keys);

// In multiply-adds, of a query and a key whose rows have so many columns in all products.
double pair_work(const FlashFwdFeatures& features, int columns);

// Threadgroups that have queries, of a grid with `columns` threadgroups for each tile of `block`
// of `total` packed rows; 0, as Work::busy takes it, unless they are packed.
double busy_threadgroups(const FlashFwdCall& call, int64_t total, int block, int64_t columns);

}  // namespace metal_attn
