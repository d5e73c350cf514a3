// Grids of tiles, and upper bounds of the work of attention's kernels, by which long launches are
// divided (csrc/runtime/pieces.h).
#pragma once

#include "csrc/problem/attention.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// The rows of q or k that tiles cover.
struct GridRows {
  const char* name;
  int64_t length;
  int64_t heads;
  int64_t parts;  // threadgroups per tile
};

struct GridTiles {
  int64_t rows;
  int listed_rows;  // rows of a BlockMask's block; 0 without a BlockMask
  bool ordered;
  int threads;
};

// A grid with a threadgroup per tile, part, head and sequence. Refuses grids that are too large.
Extent check_grid(const FlashFwdCall& call, const GridRows& rows, const GridTiles& tiles);

// The most keys of a sequence that `queries` neighbouring queries see together.
int64_t keys_seen(const FlashFwdArguments& arguments, const FlashFwdCall& call, int64_t queries);

// The most queries of a sequence that see some of `keys` neighbouring keys.
int64_t queries_seeing(const FlashFwdArguments& arguments, const FlashFwdCall& call, int64_t keys);

// The multiply-adds of a query and a key. columns: the sum of the columns of all products.
double pair_work(const FlashFwdFeatures& features, int columns);

// Work::busy of a grid with `columns` threadgroups for each tile of `block` rows. total: the packed
// rows. Returns 0 if the rows are not packed.
double busy_threadgroups(const FlashFwdCall& call, int64_t total, int block, int64_t columns);

}  // namespace metal_attn
