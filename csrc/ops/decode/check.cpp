#include "csrc/ops/decode/check.h"

#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/cache/check_append_kv.h"
#include "csrc/ops/common/check.h"
#include "csrc/problem/merge.h"

namespace metal_attn {
namespace {

// Of a KV head. The kernel's steps over rows, of all row groups, must not pass the end of int32.
constexpr int64_t kMaxRows = int64_t{1} << 30;

}  // namespace

FlashFwdCall check_flash_decode(const FlashDecodeArguments& a) {
  const FlashFwdArguments& f = a.forward;
  const FlashFwdCall call = analyse(f).call;
  check(0 <= a.num_splits && a.num_splits <= kMaxSplits, "`num_splits` is ", a.num_splits,
        "; it must be 0 (chosen for you) or in 1..", kMaxSplits);
  check(!call.problem.features.dropout, "`dropout_p` is ", f.options.dropout_p,
        "; flash_decode has no dropout: use flash_fwd");
  check(!f.options.k_rotary_cos,
        "`k_rotary_cos` is given; flash_decode has no rotation of `k`: rotate it as it enters the "
        "cache, or use flash_fwd");
  const int64_t heads = call.kv_heads > 0 ? call.heads / call.kv_heads : 0;
  check(int64_t{call.q_length} * heads <= kMaxRows, "`q` has shape ", shape_text(f.q), ", ",
        call.q_length, " queries of ", heads, " heads a KV head; flash_decode takes up to ",
        kMaxRows, " of them together: use flash_fwd");
  return call;
}

AppendKvProblem check_decode_step(const DecodeStepArguments& a) {
  const AppendKvProblem problem = check_append_kv(a.append);
  check(problem.writes(), "`k` has shape ", shape_text(a.append.k),
        ", no new rows; decode_step appends some: use flash_decode");
  // The kernel reads both as one element, and a quantised cache takes new rows of any.
  check_same_dtype("q", a.decode.forward.q, "k", a.append.k);
  return problem;
}

}  // namespace metal_attn
