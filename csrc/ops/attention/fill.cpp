#include "csrc/ops/attention/fill.h"

#include <cmath>
#include <numbers>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/cache/check.h"
#include "csrc/problem/strides.h"

namespace metal_attn {

MaskStrides mask_strides(const OptionalTensor& mask) {
  std::array<int64_t, 4> strides{};
  const int64_t rank = mask ? mask->dim() : 0;
  for (int64_t dim = 0; dim < rank; ++dim) {
    strides[static_cast<std::size_t>(4 - rank + dim)] = broadcast_stride(*mask, dim);
  }
  return {strides[0], strides[1], strides[2], strides[3]};
}

namespace {

TableStrides table_strides(const OptionalTensor& table) {
  if (!table) { return {}; }
  const bool shared = table->dim() == 2 || table->size(0) == 1;
  return {shared ? 0 : table->stride(0), table->stride(table->dim() - 2)};
}

}  // namespace

FlashParams flash_problem(const FlashFwdCall& call, const FlashFwdArguments& a) {
  const FlashFwdOptions& o = a.options;
  FlashParams params{};
  params.q_strides = row_strides(a.q);
  params.k_strides = row_strides(a.k);
  params.v_strides = row_strides(a.v);
  params.mask_strides = mask_strides(call.mask);
  params.bias_strides = mask_strides(call.bias);
  params.q_cos_strides = table_strides(o.q_rotary_cos);
  params.q_sin_strides = table_strides(o.q_rotary_sin);
  params.k_cos_strides = table_strides(o.k_rotary_cos);
  params.k_sin_strides = table_strides(o.k_rotary_sin);
  if (o.alibi_slopes && o.alibi_slopes->dim() == 2) {
    params.alibi_batch_stride = o.alibi_slopes->stride(0);
  }
  if (a.flex) { params.flex = flex_params(*a.flex, FlexWalk::kOverKeys); }
  params.q_offset = o.q_offset.value_or(0);
  params.bottom_right = !o.q_offset;
  params.window_left = window_left(o);
  params.window_right = window_right(o);
  params.batch = call.batch;
  params.q_length = call.q_length;
  params.kv_length = call.kv_length;
  params.q_total = a.packing ? call.q_total : call.q_length;
  params.kv_total = call.kv_total;
  fill_cache_params(a.cache, a.k, params);
  params.queries_per_kv = call.heads / std::max(call.kv_heads, 1);
  params.chunk = static_cast<int32_t>(o.attention_chunk);
  params.softmax_scale = static_cast<float>(call.scale);
  params.scale_log2 = static_cast<float>(call.scale * std::numbers::log2e);
  if (o.softcap > 0.0) {
    params.scale_over_cap = static_cast<float>(call.scale / o.softcap);
    params.cap_log2 = static_cast<float>(o.softcap * std::numbers::log2e);
  }
  if (o.dropout_p > 0.0) {
    // A random word drops its weight if word / 2^32 < dropout_p, exactly. dropout_p = 1 drops all.
    params.last_dropped = static_cast<uint32_t>(std::ceil(std::ldexp(o.dropout_p, 32)) - 1.0);
    params.keep_scale = o.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - o.dropout_p)) : 0.0f;
  }
  return params;
}

Buffers flash_inputs(const FlashFwdCall& call, const FlashFwdArguments& a) {
  Buffers buffers;
  // A tensor without elements has no memory to bind, so another tensor is bound and not read.
  const Tensor& placeholder = a.q.numel() > 0 ? a.q : a.k;
  const auto read = [&](uint32_t slot, const Tensor& tensor) {
    buffers.push_back({slot, tensor.numel() > 0 ? tensor : placeholder, false});
  };
  const auto read_optional = [&](uint32_t slot, const OptionalTensor& tensor) {
    if (tensor) { read(slot, *tensor); }
  };
  const FlashFwdOptions& o = a.options;
  read(FLASH_Q, a.q);
  read(FLASH_K, a.k);
  read(FLASH_V, a.v);
  if (a.packing) {
    read(FLASH_CU_SEQLENS_Q, a.packing->cu_seqlens_q);
    read_optional(FLASH_CU_SEQLENS_K, a.packing->cu_seqlens_k);
  }
  read_optional(FLASH_SEQUSED_K, o.seqused_k);
  read_optional(FLASH_LEFTPAD_K, o.leftpad_k);
  read_optional(FLASH_MASK, call.mask);
  read_optional(FLASH_BIAS, call.bias);
  read_optional(FLASH_ALIBI_SLOPES, o.alibi_slopes);
  read_optional(FLASH_SINK, o.learnable_sink);
  read_optional(FLASH_Q_COS, o.q_rotary_cos);
  read_optional(FLASH_Q_SIN, o.q_rotary_sin);
  read_optional(FLASH_K_COS, o.k_rotary_cos);
  read_optional(FLASH_K_SIN, o.k_rotary_sin);
  read_optional(FLASH_RNG_STATE, o.rng_state);
  read_optional(FLASH_BLOCK_TABLE, a.cache.block_table);
  read_optional(FLASH_CACHE_BATCH_IDX, a.cache.cache_batch_idx);
  read_optional(FLASH_K_SCALE, a.cache.k_scale);
  read_optional(FLASH_V_SCALE, a.cache.v_scale);
  if (a.flex) {
    for (std::size_t i = 0; i < a.flex->captures.size(); ++i) {
      read(FLEX_FIRST_CAPTURE + static_cast<uint32_t>(i), a.flex->captures[i]);
    }
  }
  return buffers;
}

}  // namespace metal_attn
