#include "csrc/ops/decode/decode_step.h"

#include <torch/csrc/stable/ops.h>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/cache/append_kv.h"
#include "csrc/ops/cache/check.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/ops/decode/flash_decode.h"

namespace metal_attn {
namespace {

struct DecodeStepCall {
  FlashDecodeCall decode;
  FlashFwdArguments forward;
  FlashDecodeAppend append;
};

// The number of keys of each sequence after the append if the lengths are on the CPU. Otherwise
// returns cache_seqlens, to which the kernel adds the new keys.
Tensor lengths_after(const AppendKvArguments& append, int32_t new_keys) {
  const Tensor& cache_seqlens = *append.cache_seqlens;
  const int32_t* ends = append.packed ? values_on_cpu(append.packed->cu_seqlens_k_new) : nullptr;
  const int32_t* before = values_on_cpu(cache_seqlens);
  if (before == nullptr) { return cache_seqlens; }
  // The tensor needs data even while launches are recorded and new_empty_like gives none.
  Tensor after =
      is_recording() ? torch::stable::empty_like(cache_seqlens) : new_empty_like(cache_seqlens);
  auto* lengths = static_cast<int32_t*>(after.mutable_data_ptr());
  for (int64_t b = 0; b < cache_seqlens.numel(); ++b) {
    lengths[b] = before[b] + (ends != nullptr ? ends[b + 1] - ends[b] : new_keys);
  }
  return after;
}

// Checks that no sequence reads rows that another one writes: a dispatch does not order them.
void check_reads(const AppendKvArguments& append, const AppendKvProblem& problem,
                 const FlashFwdArguments& forward, const FlashFwdCall& call) {
  const int32_t* before = values_on_cpu(*append.cache_seqlens);
  if (before == nullptr || !append.cache.indexed()) { return; }
  const int32_t* after = values_on_cpu(*forward.options.seqused_k);
  std::vector<SeenKeys> new_keys;
  for (int64_t b = 0; b < problem.batch; ++b) { new_keys.push_back({before[b], after[b]}); }
  std::multimap<int64_t, CachedRows> written;
  for (const CachedRows& rows : cached_rows(append.cache, problem.page_size, new_keys)) {
    written.insert({rows.place, rows});
  }
  for (const CachedRows& read :
       cached_rows(append.cache, problem.page_size, seen_keys(forward, call))) {
    const auto [first, last] = written.equal_range(read.place);
    for (auto one = first; one != last; ++one) {
      const CachedRows& write = one->second;
      check(write.sequence == read.sequence || write.end <= read.begin || read.end <= write.begin,
            "sequence ", write.sequence, " writes row ", std::max(write.begin, read.begin), " of ",
            place_text(append.cache), write.place, " of `k_cache`, and sequence ", read.sequence,
            " reads it in the same call; copy the ", place_text(append.cache),
            "first, so that both sequences have their own");
    }
  }
}

Defines append_defines(const AppendKvArguments& a, const AppendWidths& widths, bool wide_loads) {
  Defines defines{{"APPEND", 1}, {"WIDE_STORES", widths.stores}};
  define_if(a.packed.has_value(), defines, "PACKED_NEW_K");
  const bool rotary = a.rotary_cos.has_value();
  define_if(rotary, defines, "NEW_K_ROTARY");
  define_if(rotary && widths.rotary && wide_loads, defines, "WIDE_ROTARY");
  return defines;
}

AppendKvProblem check_decode_step(const DecodeStepArguments& a) {
  check(a.append.packed || !a.counts_new_keys,
        "`cu_seqlens_k_new` is given and `cu_seqlens_q` is not; give both or neither");
  const AppendKvProblem problem = check_append_kv(a.append);
  const Tensor& q = a.decode.forward.q;
  const int64_t length_dim = a.append.packed ? 0 : 2;
  check(!a.decode.options.has_tree() || (!a.counts_new_keys && q.dim() > length_dim &&
                                         q.size(length_dim) == a.append.k.size(length_dim)),
        "`q` has shape ", shape_text(q), " and `k` ", shape_text(a.append.k),
        "; with `parents` or `tree_mask` each new row must have a query, and `cu_seqlens_k_new` "
        "must be None");
  check(problem.writes(), "`k` has shape ", shape_text(a.append.k),
        ", so there are no new rows; decode_step needs at least one: use flash_decode");
  // append_kv quantises rows of any dtype, but this kernel reads q and k with the same dtype.
  check_same_dtype("q", q, "k", a.append.k);
  // One call for each cache, because v_cache may be columns of k_cache.
  check_written({{"k_cache", &a.append.k_cache}}, {{"q", &q}}, {});
  check_written({{"v_cache", &a.append.v_cache}}, {{"q", &q}}, {});
  return problem;
}

DecodeStepCall check_and_choose(const DecodeStepArguments& a) {
  const AppendKvArguments& append = a.append;
  const AppendKvProblem problem = check_decode_step(a);
  const AppendWidths widths = append_widths(append, problem);
  FlashDecodeArguments decode = a.decode;
  decode.forward.cache.checked = {problem.formats, problem.batch, problem.capacity};
  FlashFwdOptions& options = decode.forward.options;
  options.q_rotary_cos = append.rotary_cos;
  options.q_rotary_sin = append.rotary_sin;
  options.rotary_interleaved = append.rotary_interleaved;
  options.leftpad_k = append.leftpad_k;
  options.seqused_k = lengths_after(append, problem.length);
  FlashFwdCall forward = check_flash_decode(decode);
  check(!append.packed || forward.launches(), "`q` has shape ", shape_text(a.decode.forward.q),
        ", so there are no queries; with packed rows decode_step needs at least one");
  check_reads(append, problem, decode.forward, forward);
  forward.problem.aligned = forward.problem.aligned && widths.loads;
  if (forward.problem.features.rotary) {
    forward.problem.features.rotary->first = problem.first_rotated;
  }
  DecodeStepCall call{choose_flash_decode(forward, decode, true), decode.forward, {}};
  // The kernel adds the new keys to these lengths.
  call.forward.options.seqused_k = append.cache_seqlens;
  call.append = {append_defines(append, widths, call.decode.specialisation.wide_loads),
                 append.k,
                 append.v,
                 append.packed ? OptionalTensor(append.packed->cu_seqlens_k_new) : std::nullopt,
                 append_params(append, problem),
                 append.rotate_q_by_token};
  return call;
}

}  // namespace

std::tuple<Tensor, Tensor> decode_step(const DecodeStepArguments& a, Backend& backend) {
  return with_tiles_that_run([&] {
    const DecodeStepCall call = check_and_choose(a);
    if (!call.decode.forward.launches()) { append_kv(a.append, backend); }
    return run(call.decode, call.forward, &call.append, backend);
  });
}

}  // namespace metal_attn
