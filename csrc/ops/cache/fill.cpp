#include "csrc/ops/cache/fill.h"

#include <cstdint>
#include <optional>

#include "csrc/problem/strides.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

// By block or by head.
RowStrides scale_strides(const std::optional<Tensor>& scale) {
  if (!scale) {
    return {};
  }
  if (scale->dim() < 3) {
    return {scale->dim() == 2 ? scale->stride(0) : 0, scale->stride(scale->dim() - 1), 0};
  }
  return row_strides(*scale);
}

RopeParams rotated_q(const AppendKvArguments& a, const AppendKvProblem& p,
                     const AppendKvSpecialisation& s) {
  RopeParams params{};
  if (p.rotates_q()) {
    const RowStrides q = row_strides(*a.q);
    params.q_strides = {q.batch, q.head, q.row, 1};
    params.cos_strides = {0, a.rotary_cos->stride(0), 1};
    params.sin_strides = {0, a.rotary_sin->stride(0), 1};
    params.table_rows = p.table_rows;
    params.q_heads = p.q_heads;
    params.length = p.q_length;
    params.pairs = p.pairs;
    params.pair_units = p.pairs / s.vector;
    params.sine_sign = 1.0f;
  }
  return params;
}

}  // namespace

void fill_cache_params(const CacheOptions& o, const Tensor& k, FlashParams& params) {
  if (o.indexed()) {
    params.cache_size = static_cast<int32_t>(k.size(0));
  }
  if (o.block_table) {
    params.block_table_stride = o.block_table->stride(0);
  }
  params.k_scale_strides = scale_strides(o.k_scale);
  params.v_scale_strides = scale_strides(o.v_scale);
}

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

Launch append_kv_launch(const AppendKvArguments& a, const AppendKvProblem& p,
                        const AppendKvSpecialisation& s) {
  AppendKvParams params{};
  params.append = append_params(a, p);
  params.q = rotated_q(a, p, s);
  params.kv_heads = p.writes() ? p.kv_heads : 0;
  params.block_rows = s.block_rows;
  params.block_tokens = s.block_tokens;
  params.q_advances = a.rotate_q_by_token;

  Launch launch;
  launch.program.family = "append_kv";
  launch.kernel = "append_kv";
  launch.program.defines = append_kv_defines(a, p, s);
  const auto add = [&](uint32_t slot, const Tensor& tensor, bool writable) {
    // Where no row is written a tensor may have no memory, and q stands for it.
    launch.buffers.push_back({slot, tensor.numel() > 0 ? tensor : *a.q, writable});
  };
  const auto add_given = [&](uint32_t slot, const std::optional<Tensor>& tensor, bool writable) {
    if (tensor) {
      add(slot, *tensor, writable);
    }
  };
  add(APPEND_K, a.k, false);
  add(APPEND_V, a.v, false);
  add(APPEND_K_CACHE, a.k_cache, true);
  add(APPEND_V_CACHE, a.v_cache, true);
  add_given(APPEND_K_SCALE, a.cache.k_scale, p.block_scales());
  add_given(APPEND_V_SCALE, a.cache.v_scale, p.block_scales());
  add_given(APPEND_SEQLENS, a.cache_seqlens, false);
  add_given(APPEND_BLOCK_TABLE, a.cache.block_table, false);
  add_given(APPEND_CACHE_BATCH_IDX, a.cache.cache_batch_idx, false);
  if (a.rotary_from_leftpad) {
    add_given(APPEND_LEFTPAD_K, a.leftpad_k, false);
  }
  if (p.rotates_q()) {
    add(APPEND_Q, *a.q, true);
  }
  if (p.pairs > 0) {
    add(APPEND_COS, *a.rotary_cos, false);
    add(APPEND_SIN, *a.rotary_sin, false);
  }
  launch.params_slot = APPEND_PARAMS;
  launch.params.set(params);
  launch.threadgroups = s.threadgroups;
  launch.threads = {s.threads, 1, 1};
  return launch;
}

Launch copy_pages_launch(const Tensor& cache, const Tensor& src, const Tensor& dst,
                         const CopyPagesSpecialisation& s) {
  CopyPagesParams params{};
  params.words = s.words;
  params.page_stride = cache.stride(0) * static_cast<int64_t>(cache.element_size()) / s.word_bytes;
  params.src_stride = src.stride(0);
  params.dst_stride = dst.stride(0);
  params.pages = cache.size(0);
  params.page_words = s.page_words;

  Launch launch;
  launch.program.family = "copy_pages";
  launch.kernel = "copy_pages";
  launch.program.defines = copy_pages_defines(s);
  launch.buffers = {
      {COPY_PAGES_CACHE, cache, true}, {COPY_PAGES_SRC, src, false}, {COPY_PAGES_DST, dst, false}};
  launch.params_slot = COPY_PAGES_PARAMS;
  launch.params.set(params);
  launch.threadgroups = copy_pages_threadgroups(s);
  launch.threads = {COPY_PAGES_THREADS, 1, 1};
  return launch;
}

}  // namespace metal_attn
