// Declares the params and the threadgroup position of a kernel that may run for seconds. Such a
// launch may be several dispatches, each of a box of the grid (csrc/runtime/pieces.h). With
// GRID_PIECE the box follows the params.
#pragma once

#include "params/common.h"

#define THREAD_INDICES                                     \
  ushort thread_index [[thread_index_in_threadgroup]],     \
      ushort simdgroup [[simdgroup_index_in_threadgroup]], \
      ushort lane [[thread_index_in_simdgroup]]

#if GRID_PIECE
template <typename Params>
struct PieceParams {
  Params params;
  GridPiece piece;
};

#define GRID_PARAMS(TYPE, SLOT) constant PieceParams<TYPE>& piece_params [[buffer(SLOT)]]
#define GRID_POSITION uint3 position_in_piece [[threadgroup_position_in_grid]]
#define GRID_POSITION_AND_SIZE GRID_POSITION
#define SET_GRID_POSITION(TYPE)                \
  constant TYPE& params = piece_params.params; \
  const uint3 threadgroup_position = position_in_piece + grid_extent(piece_params.piece.first);
#define SET_GRID_POSITION_AND_SIZE(TYPE) \
  SET_GRID_POSITION(TYPE)                \
  const uint3 threadgroups = grid_extent(piece_params.piece.threadgroups);

METAL_FUNC uint3 grid_extent(constant uint32_t* sizes) {
  return uint3(sizes[0], sizes[1], sizes[2]);
}
#else
#define GRID_PARAMS(TYPE, SLOT) constant TYPE& params [[buffer(SLOT)]]
#define GRID_POSITION uint3 threadgroup_position [[threadgroup_position_in_grid]]
#define GRID_POSITION_AND_SIZE GRID_POSITION, uint3 threadgroups [[threadgroups_per_grid]]
#define SET_GRID_POSITION(TYPE)
#define SET_GRID_POSITION_AND_SIZE(TYPE)
#endif
