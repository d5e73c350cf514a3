#include "csrc/ops/merge/choose.h"

#include <algorithm>
#include <cstdint>

#include "csrc/ops/common/check.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

constexpr int kChunkBytes = 16;
constexpr int64_t kStateThreads = 256;  // of a threadgroup, at least where rows are narrow

Grid state_grid(const MergeProblem& p, bool wide_loads) {
  const int64_t chunk_columns = wide_loads ? kChunkBytes / element_bytes(p.element) : 1;
  const int64_t across = p.shape.columns / chunk_columns;
  const int64_t down = std::max<int64_t>(kStateThreads / across, 1);
  return {{1, static_cast<uint32_t>(divide_up(p.shape.rows, down)), p.shape.rows > 0 ? 1u : 0u},
          {static_cast<uint32_t>(across), static_cast<uint32_t>(down), 1}};
}

Grid splits_grid(const MergeProblem& p, bool wide_loads) {
  const int64_t lane_columns = wide_loads ? kChunkBytes / sizeof(float) : 1;
  const int64_t slices = divide_up(p.shape.columns, lane_columns * MERGE_SPLITS_COLUMN_LANES);
  const int64_t down = divide_up(p.shape.rows, MERGE_SPLITS_SIMDGROUPS);
  return {{static_cast<uint32_t>(slices), static_cast<uint32_t>(down), down > 0 ? 1u : 0u},
          {MERGE_SPLITS_SIMDGROUPS * 32, 1, 1}};
}

}  // namespace

MergeSpecialisation choose_merge_state(const MergeStateArguments& a, const MergeProblem& p) {
  // The result's rows are dense, so aligned if whole chunks make one.
  const bool wide_loads =
      rows_aligned_16(a.out_a) && rows_aligned_16(a.out_b) && dense_rows_aligned_16(p);
  return {wide_loads, state_grid(p, wide_loads)};
}

MergeSpecialisation choose_merge_splits(const Tensor& partial_out, const MergeProblem& p,
                                        bool out_aligned) {
  // Four columns of a split, and those of out that come of them, are one vector.
  const bool wide_loads =
      out_aligned && rows_aligned_16(partial_out) && partial_out.size(4) % 4 == 0;
  return {wide_loads, splits_grid(p, wide_loads)};
}

bool dense_rows_aligned_16(const MergeProblem& p) {
  return p.shape.columns * element_bytes(p.element) % kChunkBytes == 0;
}

Defines merge_defines(const MergeProblem& p, const MergeSpecialisation& s) {
  Defines defines{{"ELEMENT", element_name(p.element)}, {"WIDE_LOADS", s.wide_loads}};
  if (p.sink) {
    defines.push_back({"SINK", 1});
    defines.push_back({"SINK_ELEMENT", element_name(*p.sink)});
  }
  if (p.infinity_is_empty) {
    defines.push_back({"INFINITY_IS_EMPTY", 1});
  }
  if (p.in_place) {
    defines.push_back({"IN_PLACE", 1});
  }
  if (p.some_rows) {
    defines.push_back({"SOME_ROWS", 1});
  }
  return defines;
}

}  // namespace metal_attn
