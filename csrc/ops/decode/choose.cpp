#include "csrc/ops/decode/choose.h"

#include <algorithm>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/tiles/remember.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

// Whether two tensors begin at one element and step alike, the second no wider.
bool begins(const Tensor& whole, const Tensor& part) {
  const int64_t last = part.dim() - 1;
  bool same = part.numel() > 0 && part.const_data_ptr() == whole.const_data_ptr() &&
              part.dim() == whole.dim() && part.size(last) <= whole.size(last);
  for (int64_t dim = 0; same && dim < last; ++dim) {
    same = part.stride(dim) == whole.stride(dim);
  }
  return same;
}

// Whether v is the first columns of k, as in the latent caches of DeepSeek's MLA: one read serves
// both.
bool v_in_k(const FlashFwdArguments& a) {
  const bool scaled = a.cache.k_scale && a.cache.v_scale;
  return begins(a.k, a.v) && (!scaled || begins(*a.cache.k_scale, *a.cache.v_scale));
}

// Keys that the queries of one sequence read, at most.
int64_t keys_read(const FlashFwdArguments& f, const FlashFwdCall& call) {
  const FlashFwdOptions& o = f.options;
  int64_t keys = call.kv_length;
  if (f.flex && f.flex->kv_num_blocks) {
    keys = std::min(keys, listed_keys(*f.flex));
  }
  const int64_t right = o.causal ? 0 : o.window_size_right;
  if (o.window_size_left >= 0 && right >= 0) {
    // Either may be near 2^63.
    keys =
        std::min(keys, std::min(o.window_size_left, keys) + std::min(right, keys) + call.q_length);
  }
  if (o.q_offset && window_right(o) != NO_WINDOW) {
    keys = std::clamp<int64_t>(*o.q_offset + call.q_length + window_right(o), 0, keys);
  }
  if (o.attention_chunk > 0) {
    keys = std::min(keys, o.attention_chunk + call.q_length);
  }
  return keys;
}

// Of a sequence: that many fill any GPU, and its grid stays far from the end of 32 bits.
constexpr int64_t kMostGroups = 1 << 16;

}  // namespace

FlashDecodeCall choose_flash_decode(const FlashFwdCall& forward, const FlashDecodeArguments& a,
                                    bool appends) {
  const FlashFwdArguments& f = a.forward;
  FlashDecodeCall call{forward, {}, 0, 1, 1, {}};
  if (!forward.launches()) {
    return call;
  }
  call.keys = keys_read(f, forward);
  const Gpu on = gpu();
  TileRequest request{forward.problem};
  request.problem.keys = 0;  // does not count, and may grow with each call
  request.v_in_k = v_in_k(f);
  request.rows = call.rows();
  call.specialisation = remembered_tile<FlashDecodeSpecialisation>(
      request, call.rows(), call.keys, on,
      [&] { return choose_flash_decode(forward.problem, request.rows, request.v_in_k, on); });
  const FlashDecodeSpecialisation& s = call.specialisation;
  // Only the threadgroups that write new keys see them.
  const int64_t most = std::max<int64_t>(kMostGroups / forward.kv_heads, 1);
  call.row_groups = appends ? 1 : std::min(s.passes(call.rows()), most);
  const int64_t groups = int64_t{forward.batch} * forward.kv_heads * call.row_groups;
  const int64_t own_rows = (call.rows() + call.row_groups - 1) / call.row_groups;
  call.splits = a.num_splits > 0 ? a.num_splits
                                 : flash_decode_splits(s, groups, own_rows, call.keys, gpu().cores);
  call.threadgroups = {static_cast<uint32_t>(call.splits),
                       static_cast<uint32_t>(forward.kv_heads * call.row_groups),
                       static_cast<uint32_t>(forward.batch)};
  return call;
}

Defines flash_decode_defines(const FlashDecodeCall& call, const FlashDecodeAppend* append) {
  Defines defines = flash_decode_defines(call.specialisation, call.splits > 1);
  if (append != nullptr) {
    defines.append(append->defines.begin(), append->defines.end());
  }
  return defines;
}

}  // namespace metal_attn
