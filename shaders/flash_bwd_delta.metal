// The first kernel of the backward: delta = rowsum(dout * out) - dlse. A SIMD group has one row.
//
// Dao, "FlashAttention-2" (2023), algorithm 2, line 4. dlse is subtracted because d lse / d score
// is the weight, by which delta is multiplied.
#include "params/backward.h"
#include "tile.h"

// The host defines ELEMENT, HEAD_DIM_V, SIMDGROUPS, and DLSE if the log-sum-exp has a gradient.
constant constexpr int THREADS = SIMDGROUPS * SIMD_LANES;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_bwd_delta(
    const device ELEMENT* out [[buffer(FLASH_BWD_OUT)]],
    const device ELEMENT* dout [[buffer(FLASH_BWD_DOUT)]],
#if DLSE
    const device float* dlse [[buffer(FLASH_BWD_DLSE)]],
#endif
    device float* delta [[buffer(FLASH_BWD_DELTA)]],
    constant FlashBwdParams& params [[buffer(FLASH_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int batch = threadgroup_position.z;
  const int head = threadgroup_position.y;
  const int row = threadgroup_position.x * SIMDGROUPS + simdgroup;
  if (row >= params.problem.q_total) { return; }
  const device ELEMENT* out_row = out + batch * params.out_strides.batch +
                                  head * params.out_strides.head + row * params.out_strides.row;
  const device ELEMENT* dout_row = dout + batch * params.dout_strides.batch +
                                   head * params.dout_strides.head + row * params.dout_strides.row;
  float sum = 0.0f;
  for (int column = lane; column < HEAD_DIM_V; column += SIMD_LANES) {
    sum += float(dout_row[column]) * float(out_row[column]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
#if DLSE
    sum -= dlse[batch * params.dlse_strides.batch + head * params.dlse_strides.head +
                row * params.dlse_strides.row];
#endif
    delta[batch * params.lse_strides.batch + head * params.lse_strides.head +
          row * params.lse_strides.row] = sum;
  }
}
