// Adds up, in a fixed order, the parts of dk or dv that flash_bwd_dkv writes with HEAD_SPLITS. Each
// SIMD group adds up one row.
#include "params/backward.h"
#include "tile.h"

// The host defines ELEMENT, HEAD_DIM and SIMDGROUPS.
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_sum(
    const device float* parts [[buffer(FLASH_BWD_SUM_PARTS)]],
    device ELEMENT* sums [[buffer(FLASH_BWD_SUM_RESULT)]],
    constant FlashBwdSumParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int batch = threadgroup_position.z;
  const int head = threadgroup_position.y;
  const int row = threadgroup_position.x * SIMDGROUPS + simdgroup;
  if (row >= params.rows) { return; }
  const device float* first = parts + batch * params.part_strides.batch +
                              head * params.part_strides.head + row * params.part_strides.row;
  device ELEMENT* sum_row = sums + batch * params.sum_strides.batch +
                            head * params.sum_strides.head + row * params.sum_strides.row;
  for (int column = lane; column < HEAD_DIM; column += SIMD_LANES) {
    float sum = first[column];
    for (int split = 1; split < params.splits; split++) {
      sum += first[split * params.split_stride + column];
    }
    sum_row[column] = ELEMENT(sum);
  }
}
