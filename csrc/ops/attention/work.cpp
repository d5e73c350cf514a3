#include "csrc/ops/attention/work.h"

#include <algorithm>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/runtime/launch.h"
#include "csrc/tiles/table.h"

namespace metal_attn {
namespace {

// How many of `length` rows of the other side the window and the chunks leave. The window's sides
// may be near 2^63.
int64_t in_window(const FlashFwdOptions& o, int64_t length, int64_t rows) {
  const int64_t right = o.causal ? 0 : o.window_size_right;
  if (o.window_size_left >= 0 && right >= 0) {
    length =
        std::min(length, std::min(o.window_size_left, length) + std::min(right, length) + rows);
  }
  return o.attention_chunk > 0 ? std::min(length, o.attention_chunk + rows) : length;
}

}  // namespace

int64_t keys_seen(const FlashFwdArguments& a, const FlashFwdCall& call, int64_t queries) {
  const FlashFwdOptions& o = a.options;
  int64_t keys = call.kv_length;
  if (a.flex && a.flex->kv_num_blocks) {
    keys = std::min(keys, listed_keys(*a.flex));
  }
  if (o.q_offset && window_right(o) != NO_WINDOW) {
    keys = std::clamp<int64_t>(*o.q_offset + call.q_length + window_right(o), 0, keys);
  }
  return in_window(o, keys, queries);
}

int64_t queries_seeing(const FlashFwdArguments& a, const FlashFwdCall& call, int64_t keys) {
  int64_t queries = call.q_length;
  if (a.flex && a.flex->q_num_blocks) {
    int64_t longest = 0;
    for (const auto* indices : {&a.flex->q_indices, &a.flex->full_q_indices}) {
      longest += *indices ? (*indices)->size(3) : 0;
    }
    queries = std::min(queries, longest * a.flex->q_block_size);
  }
  return in_window(a.options, queries, keys);
}

double pair_work(const FlashFwdFeatures& features, int columns) {
  // By judgement: the softmax's instructions, and those of functions, random numbers and masks.
  return columns + (register_pressure_of(features) == RegisterPressure::kLight ? 64 : 256);
}

double busy_threadgroups(const FlashFwdCall& call, int64_t total, int block, int64_t columns) {
  const bool packed = call.problem.features.varlen;
  return packed ? double(columns) * double(divide_up(total, block) + call.batch + 1) : 0;
}

}  // namespace metal_attn
