// Attention over the union of disjoint sets of keys, from the results over each set.
//
// With lse the log-sum-exp of a set's scores and out its normalised output,
//   lse = log(sum_s exp(lse_s))      out = sum_s exp(lse_s - lse) out_s
// Ye et al., "FlashInfer" (2025), section 2.2, the operator on attention states; after Dao,
// "FlashAttention-2" (2023), section 2.3. A set without keys has lse -inf and changes nothing. Its
// out is not read and may hold anything.
#include "base_2.h"
#include "params/merge.h"
#include "softmax.h"

// The host defines ELEMENT and WIDE_LOADS; INFINITY_IS_EMPTY, IN_PLACE and SOME_ROWS for
// merge_state; SINK, SINK_ELEMENT and SUMS for merge_splits.

FEATURE(INFINITY_IS_EMPTY)
FEATURE(IN_PLACE)
FEATURE(SOME_ROWS)
FEATURE(SUMS)

// The indices of a row.
struct MergeRow {
  int64_t batch;
  int64_t head;
  int64_t row;

  METAL_FUNC void reset(constant MergeShape& shape, uint index) thread {
    const uint length = shape.length;
    const uint heads = shape.heads;
    row = index % length;
    head = index / length % heads;
    batch = index / length / heads;
  }

  METAL_FUNC int64_t offset(constant RowStrides& strides) const thread {
    return batch * strides.batch + head * strides.head + row * strides.row;
  }
};

// 16 bytes of a row, or one element without WIDE_LOADS. Copies keep the bits.
using Chunk = conditional_t<WIDE_LOADS, uint4, ELEMENT>;
using SplitColumns = conditional_t<WIDE_LOADS, float4, float>;
constant constexpr int CHUNK_COLUMNS = int(sizeof(Chunk) / sizeof(ELEMENT));
constant constexpr int SPLIT_COLUMNS = int(sizeof(SplitColumns) / sizeof(float));

METAL_FUNC Chunk load_columns(const device ELEMENT* first) {
  return *reinterpret_cast<const device Chunk*>(first);
}

METAL_FUNC SplitColumns load_split(const device float* first) {
  return *reinterpret_cast<const device SplitColumns*>(first);
}

METAL_FUNC void store_columns(device ELEMENT* first, float value) { *first = ELEMENT(value); }

METAL_FUNC void store_columns(device ELEMENT* first, float4 values) {
  *reinterpret_cast<device vec<ELEMENT, 4>*>(first) =
      vec<ELEMENT, 4>(ELEMENT(values.x), ELEMENT(values.y), ELEMENT(values.z), ELEMENT(values.w));
}

// The sum over the lanes that have the same columns of different splits.
METAL_FUNC float sum_splits(float value) {
  UNROLL
  for (ushort step = MERGE_SPLITS_COLUMN_LANES; step < SIMD_LANES; step *= 2) {
    value += simd_shuffle_xor(value, step);
  }
  return value;
}

METAL_FUNC float4 sum_splits(float4 values) {
  return float4(sum_splits(values.x), sum_splits(values.y), sum_splits(values.z),
                sum_splits(values.w));
}

// The log-sum-exp of a state. flash-attn and vLLM use +inf for a state without keys.
METAL_FUNC float lse_of(float lse) {
  return INFINITY_IS_EMPTY && lse == INFINITY ? -INFINITY : lse;
}

// Each thread merges one chunk of a row.
[[kernel, max_total_threads_per_threadgroup(MERGE_STATE_THREADS)]] void merge_state(
    // clang-format off
    UNLESS(IN_PLACE, const device ELEMENT* out_a [[buffer(MERGE_STATE_OUT_A)]],
                     const device float* lse_a [[buffer(MERGE_STATE_LSE_A)]],)
    WHEN(SOME_ROWS, const device uchar* mask [[buffer(MERGE_STATE_MASK)]],)
    // clang-format on
    const device ELEMENT* out_b [[buffer(MERGE_STATE_OUT_B)]],
    const device float* lse_b [[buffer(MERGE_STATE_LSE_B)]],
    device ELEMENT* out [[buffer(MERGE_STATE_OUT)]], device float* lse [[buffer(MERGE_STATE_LSE)]],
    constant MergeStateParams& params [[buffer(MERGE_STATE_PARAMS)]],
    uint3 position [[thread_position_in_grid]]) {
  const int column = int(position.x) * CHUNK_COLUMNS;
  const bool exists = column < params.shape.columns && position.y < params.shape.rows;
  MergeRow row;
  float lses[2];
  WHEN(IN_PLACE, const device ELEMENT* out_a = out; const device float* lse_a = lse;)
  if (!IN_PLACE && !exists) { return; }
  row.reset(params.shape, IN_PLACE ? min(position.y, params.shape.rows - 1) : position.y);
  lses[0] = lse_of(lse_a[row.offset(params.lse_a_strides)]);
  if (IN_PLACE) {
    // Wait until all threads of a row have read the log-sum-exp, which one of them overwrites.
    threadgroup_barrier(mem_flags::mem_device);
  }
  bool written = exists;
  WHEN(SOME_ROWS, written = written && mask[row.offset(params.mask_strides)] != 0;)
  if (!written) { return; }
  lses[1] = lse_of(lse_b[row.offset(params.lse_b_strides)]);
  const bool has_a = lses[0] != -INFINITY;
  const bool has_b = lses[1] != -INFINITY;
  Chunk a = Chunk(0);
  Chunk b = Chunk(0);
  if (has_a) { a = load_columns(out_a + row.offset(params.out_a_strides) + column); }
  if (has_b) { b = load_columns(out_b + row.offset(params.out_b_strides) + column); }

  SoftmaxNormaliser normaliser;
  normaliser.reset();
  normaliser.update<2>(lses);
  Chunk merged = has_a ? a : b;
  float merged_lse = has_a ? lses[0] : lses[1];
  if (has_a && has_b) {
    const float factor = normaliser.finalize();
    const float weight_a = normaliser.weight(lses[0]) * factor;
    const float weight_b = normaliser.weight(lses[1]) * factor;
    UNROLL
    for (short i = 0; i < CHUNK_COLUMNS; i++) {
      const float value_a = float(reinterpret_cast<thread const ELEMENT*>(&a)[i]);
      const float value_b = float(reinterpret_cast<thread const ELEMENT*>(&b)[i]);
      reinterpret_cast<thread ELEMENT*>(&merged)[i] =
          ELEMENT(weight_a * value_a + weight_b * value_b);
    }
    merged_lse = normaliser.logsumexp();
  }
  *reinterpret_cast<device Chunk*>(out + row.offset(params.out_strides) + column) = merged;
  if (column == 0) { lse[row.offset(params.lse_strides)] = merged_lse; }
}

constant constexpr int SPLIT_LANES = SIMD_LANES / MERGE_SPLITS_COLUMN_LANES;
constant constexpr int SPLIT_STEPS = SIMD_LANES / SPLIT_LANES;

// The weight of a split without keys.
constant constexpr float NO_KEYS = -1.0f;

// A SIMD group has some columns of a row. MERGE_SPLITS_COLUMN_LANES lanes hold neighbouring columns
// of one split, and SPLIT_LANES such groups of lanes have different splits. Decoding has few rows,
// so that a SIMD group gets few columns. A lane loads its part of 32 splits before it sums them,
// which keeps many loads in flight. Each lane computes the weight of one split.
//
// partial_out is (row, split, column) and partial_lse is (row, split), contiguous. With SUMS, which
// flash_decode writes, a row of partial_lse has the maximum of each split's scores, in base 2, and
// then the sum of each split's weights. A log-sum-exp of both would lose the sum if the maximum is
// as large as the lowest float, which masks have.
[[kernel, max_total_threads_per_threadgroup(MERGE_SPLITS_SIMDGROUPS* SIMD_LANES)]] void
merge_splits(const device float* partial_out [[buffer(MERGE_SPLITS_PARTIAL_OUT)]],
             const device float* partial_lse [[buffer(MERGE_SPLITS_PARTIAL_LSE)]],
             WHEN(SINK, const device SINK_ELEMENT* sink [[buffer(MERGE_SPLITS_SINK)]], )
                 device ELEMENT* out [[buffer(MERGE_SPLITS_OUT)]],
             device float* lse [[buffer(MERGE_SPLITS_LSE)]],
             constant MergeSplitsParams& params [[buffer(MERGE_SPLITS_PARAMS)]],
             uint3 threadgroup_position [[threadgroup_position_in_grid]],
             ushort simdgroup [[simdgroup_index_in_threadgroup]],
             ushort lane [[thread_index_in_simdgroup]]) {
  const uint index = threadgroup_position.y * MERGE_SPLITS_SIMDGROUPS + simdgroup;
  if (index >= params.shape.rows) { return; }
  MergeRow row;
  row.reset(params.shape, index);
  const int slice_lane = lane % MERGE_SPLITS_COLUMN_LANES;
  const int column =
      (int(threadgroup_position.x) * MERGE_SPLITS_COLUMN_LANES + slice_lane) * SPLIT_COLUMNS;
  const bool in_row = column < params.shape.columns;
  const int64_t first_split = int64_t(index) * params.splits;
  const device float* row_lse = partial_lse + (SUMS ? 2 : 1) * first_split;
  const device float* row_out = partial_out + first_split * params.shape.columns + column;

  Normaliser<SUMS> normaliser;
  normaliser.reset();
  SplitColumns sum = SplitColumns(0.0f);
  for (int block = 0; block < params.splits; block += SIMD_LANES) {
    float own_lse = block + lane < params.splits ? lse_of(row_lse[block + lane]) : -INFINITY;
    float own_sum = 1.0f;
    if (SUMS && block + lane < params.splits) {
      own_sum = row_lse[params.splits + block + lane];
      own_lse = own_sum == 0.0f ? -INFINITY : own_lse;
    }
    // max() drops a NaN, which simd_max might return. The weight is still NaN.
    sum *= normaliser.raise(simd_max(max(normaliser.row_max, own_lse)));
    const float own_weight = normaliser.weight(own_lse) * own_sum;
    normaliser.row_sum += own_weight;
    const float shared_weight = own_lse == -INFINITY ? NO_KEYS : own_weight;
    float weights[SPLIT_STEPS];
    SplitColumns loaded[SPLIT_STEPS];
    UNROLL
    for (short i = 0; i < SPLIT_STEPS; i++) {
      const ushort split = i * SPLIT_LANES + lane / MERGE_SPLITS_COLUMN_LANES;
      weights[i] = simd_shuffle(shared_weight, split);
      loaded[i] = SplitColumns(0.0f);
      if (weights[i] >= 0.0f && in_row) {
        loaded[i] = load_split(row_out + int64_t(block + split) * params.shape.columns);
      }
    }
    UNROLL
    for (short i = 0; i < SPLIT_STEPS; i++) { sum += weights[i] * loaded[i]; }
  }
  normaliser.merge_lanes();
  WHEN(SINK, const SINK_ELEMENT head_sink = sink[row.head];
       const float logit = SUMS ? base_2(head_sink) : float(head_sink);
       sum *= normaliser.raise(max(normaliser.row_max, logit));
       const float sink_weight =
           SUMS ? fast::exp2(base_2_less(head_sink, normaliser.row_max)) : normaliser.weight(logit);
       normaliser.row_sum += sink_weight;)
  sum = sum_splits(sum) * normaliser.finalize();
  if (in_row && lane < MERGE_SPLITS_COLUMN_LANES) {
    store_columns(out + row.offset(params.out_strides) + column, sum);
    if (column == 0) { lse[row.offset(params.lse_strides)] = normaliser.logsumexp(); }
  }
}
