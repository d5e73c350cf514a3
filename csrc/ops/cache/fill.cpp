#include "csrc/ops/cache/fill.h"

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/cache/check.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/rope/rotation.h"

namespace metal_attn {

AppendParams append_params(const AppendKvArguments& a, const AppendKvProblem& p) {
  AppendParams params{};
  params.k_strides = row_strides(a.k);
  params.v_strides = row_strides(a.v);
  params.k_cache_strides = row_strides(a.k_cache);
  params.v_cache_strides = row_strides(a.v_cache);
  params.k_scale_strides = scale_strides(a.cache.k_scale);
  params.v_scale_strides = scale_strides(a.cache.v_scale);
  if (a.rotary_cos) {
    params.cos_strides.row = a.rotary_cos->stride(0);
    params.sin_strides.row = a.rotary_sin->stride(0);
  }
  params.block_table_stride = a.cache.block_table ? a.cache.block_table->stride(0) : 0;
  params.length = p.length;
  params.capacity = p.capacity;
  params.cache_size = p.cache_size;
  params.table_rows = p.table_rows;
  params.rotary_from_leftpad = a.rotary_from_leftpad;
  return params;
}

AppendWidths append_widths(const AppendKvArguments& a, const AppendKvProblem& p) {
  const bool whole_units = p.head_dim_qk % kUnitColumns == 0 && p.head_dim_v % kUnitColumns == 0;
  const int store_bytes = kv_load_bytes(Element::kHalf, p.format);
  AppendWidths widths{};
  widths.loads = whole_units && rows_aligned_16(a.k) && rows_aligned_16(a.v);
  widths.stores =
      whole_units && rows_aligned(a.k_cache, store_bytes) && rows_aligned(a.v_cache, store_bytes);
  widths.rotary = widths.loads && a.rotary_cos && rows_aligned_16(*a.rotary_cos) &&
                  rows_aligned_16(*a.rotary_sin) &&
                  turns_by_chunks(p.element, 2 * p.pairs, a.rotary_interleaved);
  return widths;
}

}  // namespace metal_attn
