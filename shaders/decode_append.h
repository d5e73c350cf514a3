// New keys and values that a decoding kernel writes to the cache before it reads it.
#pragma once

#include "cache_write.h"
#include "inputs.h"

// Writes the new rows of one (sequence, KV head) after its `length` keys. Only with APPEND, where
// the cache and its scales are not const.
METAL_FUNC void append(thread const FlashInputs& inputs, thread const TokenTree& tree, int length,
                       int batch, int kv_head, int thread_index, int threads,
                       constant FlashParams& problem, constant AppendParams& params) {
  const Range rows = inputs.new_rows(batch, problem);
  AppendBuffers buffers;
  buffers.k = inputs.new_k + rows.begin * params.k_strides.row;
  buffers.v = inputs.new_v + rows.begin * params.v_strides.row;
  WHEN(APPEND, buffers.k_cache = inputs.k; buffers.v_cache = inputs.v;
       buffers.k_scale = inputs.k_scale; buffers.v_scale = inputs.v_scale;)
  buffers.cos_table = inputs.q_cos;
  buffers.sin_table = inputs.q_sin;
  AppendPlace place;
  place.tree = tree;
  place.first = length;
  place.first_rotary = length;
  if (LEFTPAD_K) {
    place.first_rotary -= params.rotary_from_leftpad != 0 ? inputs.leftpad_k[batch] : 0;
  }
  if (PAGED) {
    place.block_table = inputs.block_table + batch * params.block_table_stride;
  }
  place.cache_batch = CACHE_BATCH_IDX ? inputs.cache_batch_idx[batch] : batch;
  append_rows(buffers, place, batch, kv_head, 0, rows.end - rows.begin, thread_index, threads,
              params);
}
