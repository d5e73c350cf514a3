#include <limits>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/decode/flash_decode.h"

namespace metal_attn {
namespace {

// The most queries for which flash_decode is chosen, as in torch_metal_attn/with_kvcache.py.
constexpr int64_t kDecodeQueries = 32;

// True if all rows of a KV head, which are queries of several heads, have the same list.
bool have_one_list(const FlexOptions& flex, const FlashFwdCall& call) {
  bool shared = call.q_length <= flex.q_block_size;
  for (const auto* lists :
       {&flex.kv_indices, &flex.full_kv_indices, &flex.kv_num_blocks, &flex.full_kv_num_blocks}) {
    shared = shared && (!*lists || call.heads == call.kv_heads || (*lists)->size(1) == 1);
  }
  // The kernel counts the keys of a list in int32.
  return shared && listed_rows(flex, FlexWalk::kOverKeys) <= std::numeric_limits<int32_t>::max();
}

// True if flash_decode has all options of the call, and its queries are few.
bool suits_decode(const FlashFwdArguments& a) {
  const bool few = a.q.defined() && a.q.dim() == 4 && a.q.size(2) <= kDecodeQueries;
  return few && !a.packing && !a.options.k_rotary_cos && a.options.dropout_p == 0.0;
}

// The call of flash_decode, or none if flash_fwd runs.
std::optional<FlashDecodeCall> decode_call(const FlashFwdArguments& a) {
  if (!suits_decode(a)) { return std::nullopt; }
  FlashFwdCall call = check_flash_fwd(a);
  if (!call.launches() || int64_t{call.q_length} * call.heads / call.kv_heads > kMaxRows) {
    return std::nullopt;
  }
  if (a.flex) {
    if (a.flex->kv_num_blocks && !have_one_list(*a.flex, call)) { return std::nullopt; }
    // Threadgroups of flash_decode share the lists evenly.
    call.problem.features.flex->ordered = false;
  }
  return choose_flash_decode(call, {a, 0}, false);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd(const FlashFwdArguments& a, Backend& backend) {
  return with_tiles_that_run([&] {
    const std::optional<FlashDecodeCall> decode = decode_call(a);
    return decode ? run(*decode, a, nullptr, backend) : flash_fwd(a, backend);
  });
}

}  // namespace metal_attn
