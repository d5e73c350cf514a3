
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/decode/flash_decode.h"

namespace metal_attn {
namespace {

// The most queries for which flash_decode is used, as in torch_metal_attn/flex/call.py.
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

// nullopt if flash_fwd should be used.
std::optional<FlashDecodeCall> decoding_of(const FlashFwdArguments& a) {
  if (!a.q.defined() || a.q.dim() != 4 || a.q.size(2) > kDecodeQueries) { return std::nullopt; }
  FlashFwdCall call = check_flash_fwd(a);
  if (!call.launches() || (a.flex->kv_num_blocks && !have_one_list(*a.flex, call))) {
    return std::nullopt;
  }
  // Threadgroups of flash_decode share the lists evenly.
  call.problem.features.flex->ordered = false;
  return choose_flash_decode(call, {a, 0}, false);
}

}  // namespace

std::tuple<Tensor, Tensor> flex_fwd(const FlashFwdArguments& a, Backend& backend) {
  return with_tiles_that_run([&] {
    const std::optional<FlashDecodeCall> decoding = decoding_of(a);
    return decoding ? run(*decoding, a, nullptr, backend) : flash_fwd(a, backend);
  });
}

}  // namespace metal_attn
