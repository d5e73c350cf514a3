#include <algorithm>
#include <limits>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/attention/mask_blocks.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/ops/decode/flash_decode.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/tiles/flash_fwd.h"

namespace metal_attn {
namespace {

// The most queries for which flash_decode is chosen, as in torch_metal_attn/with_kvcache.py.
constexpr int64_t kDecodeQueries = 32;

// The most queries, and the fewest keys, for which splits are considered, as in the same file.
constexpr int64_t kSplitQueries = 512;
constexpr int64_t kSplitKeys = 2048;

// The widest heads for which the time of flash_decode's products was estimated.
constexpr int kSplitColumns = 256;

// Cycles of a product of 8x8 matrices in the kernels' loops. Those of flash_decode are 24 by Mesa's
// compiler with 16 rows, and 2 for the weights that SIMD groups with other columns compute again.
constexpr double kForwardCycles = 22;
constexpr double kDecodeCycles = 26;

// The part of flash_fwd's estimated time that flash_decode must save.
constexpr double kLeastGain = 0.05;

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

// True if flash_decode has all options of the call, and may be faster for so many queries.
bool suits_decode(const FlashFwdArguments& a, const FlashFwdCall& call) {
  return call.launches() && call.q_length <= kSplitQueries && !a.packing &&
         !a.options.k_rotary_cos && !call.problem.features.dropout &&
         int64_t{call.q_length} * call.heads / call.kv_heads <= kMaxRows;
}

// True if many keys of many queries may be split.
bool may_be_split(const FlashFwdArguments& a, const FlashFwdCall& call) {
  const FlashFwdProblem& p = call.problem;
  return !a.flex && gpu().family < kTensorFamily && !skips_mask_blocks(call) &&
         std::max(p.head_dim_qk, p.head_dim_v) <= kSplitColumns &&
         keys_seen(a, call, call.q_length) >= kSplitKeys;
}

// The estimated cycles of the busiest core, if each threadgroup has so many rows and keys.
double cycles(int64_t threadgroups, int64_t rows, int64_t keys, double product_cycles) {
  const int64_t waves = divide_up(threadgroups, gpu().cores);
  return double(waves) * double(divide_up(rows, 8)) * double(keys) * product_cycles;
}

// True if splits save time because flash_fwd has too few threadgroups for the GPU or its last wave.
bool gains(const FlashDecodeCall& decode, const FlashFwdArguments& a, const FlashFwdCall& call) {
  if (decode.splits == 1) { return false; }
  const FlashFwdSpecialisation f = choose_flash_fwd(call.problem, false, gpu());
  const int64_t tiles = divide_up(call.q_length, f.block_q()) * f.v_slices();
  const int64_t tile_rows = std::min<int64_t>(f.block_q(), call.q_length);
  const double forward = cycles(int64_t{call.batch} * call.heads * tiles, tile_rows,
                                keys_seen(a, call, tile_rows), kForwardCycles);
  const FlashDecodeSpecialisation& d = decode.specialisation;
  const int64_t groups = int64_t{call.batch} * call.kv_heads * decode.row_groups;
  // A pass over the keys takes as long with fewer rows.
  const int64_t rows =
      d.passes(divide_up(decode.list_rows(), decode.row_groups)) * d.rows_at_once();
  const double split =
      cycles(groups * decode.splits, rows, divide_up(decode.keys, decode.splits), kDecodeCycles);
  return split <= (1.0 - kLeastGain) * forward;
}

// The call of flash_decode, or none if flash_fwd runs.
std::optional<FlashDecodeCall> decode_call(const FlashFwdArguments& a, FlashFwdCall call) {
  const bool few = call.q_length <= kDecodeQueries;
  if (!few && !may_be_split(a, call)) { return std::nullopt; }
  if (a.flex) {
    if (a.flex->kv_num_blocks && !have_one_list(*a.flex, call)) { return std::nullopt; }
    // Threadgroups of flash_decode share the lists evenly.
    call.problem.features.flex->ordered = false;
  }
  const FlashDecodeCall decode = choose_flash_decode(call, {a, 0}, false);
  return few || gains(decode, a, call) ? std::optional(decode) : std::nullopt;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd(const FlashFwdArguments& a, Backend& backend) {
  const FlashFwdCall call = check_flash_fwd(a);
  if (!suits_decode(a, call)) { return flash_fwd(call, a, backend); }
  return with_tiles_that_run([&] {
    const std::optional<FlashDecodeCall> decode = decode_call(a, call);
    return decode ? run(*decode, a, nullptr, backend) : flash_fwd(call, a, backend);
  });
}

}  // namespace metal_attn
