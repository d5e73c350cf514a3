#include "csrc/ops/decode/flash_decode.h"

#include <array>

#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/decode/check.h"
#include "csrc/ops/decode/fill.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor of flash_decode's results, with a dimension of splits behind that of queries.
Tensor empty_partial(const FlashDecodeCall& call, const Tensor& like, int64_t columns) {
  const FlashFwdCall& f = call.forward;
  Dims sizes{f.batch, f.heads, f.q_length, call.splits};
  if (columns > 0) {
    sizes.push_back(columns);
  }
  return new_empty(like, sizes, ScalarType::Float);
}

}  // namespace

std::tuple<Tensor, Tensor> run(const FlashDecodeCall& call, const FlashFwdArguments& a,
                               const FlashDecodeAppend* append, Backend& backend) {
  Tensor out = new_out(a, call.forward.problem.head_dim_v);
  Tensor lse = new_lse(a);
  if (!call.forward.launches()) {
    return {out, lse};
  }
  note(backend, [&] {
    const FlashDecodeSpecialisation& s = call.specialisation;
    return tile_note(s, call.rows(), call.keys)
        .add("splits", call.splits)
        .add("reason", describe_choice(s, call.rows(), call.row_groups, call.splits, gpu()));
  });
  if (call.splits == 1) {
    backend.run(flash_decode_launch(call, a, append, out, lse));
  } else {
    const Tensor partial_out = empty_partial(call, a.q, call.specialisation.head_dim_v);
    const Tensor partial_lse = empty_partial(call, a.q, 0);
    backend.run(flash_decode_launch(call, a, append, partial_out, partial_lse));
    merge_splits(partial_out, partial_lse, a.options.learnable_sink, out, lse, backend);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> flash_decode(const FlashDecodeArguments& a, Backend& backend) {
  return without_bad_rows([&] {
    return run(choose_flash_decode(check_flash_decode(a), a, false), a.forward, nullptr, backend);
  });
}

}  // namespace metal_attn
