// What append_kv refuses, and what is left to know about its arguments.
#pragma once

#include <cstdint>
#include <optional>

#include "csrc/ops/attention/choose.h"
#include "csrc/ops/cache/append_kv.h"

namespace metal_attn {

struct AppendKvProblem {
  Element element;
  KvFormat format;
  std::optional<Element> cache_element;  // where it is not k's, and they are not quantised
  int32_t batch;
  int32_t kv_heads;
  int32_t length;
  int32_t head_dim_qk;
  int32_t head_dim_v;
  int32_t capacity;    // rows that a sequence may have
  int32_t cache_size;  // batches or pages of the caches
  int32_t page_size;   // 0: not paged
  int32_t pairs;       // columns of rotary_cos
  int32_t table_rows;
  Element table_element;
  int32_t q_heads;
  int32_t q_length;

  bool block_scales() const { return format == KvFormat::kQ8_0 || format == KvFormat::kQ4_0; }
  bool writes() const { return batch > 0 && kv_heads > 0 && length > 0; }
  bool turns_q() const { return batch > 0 && q_heads > 0 && q_length > 0 && pairs > 0; }
};

AppendKvProblem check_append_kv(const AppendKvArguments& arguments);

}  // namespace metal_attn
