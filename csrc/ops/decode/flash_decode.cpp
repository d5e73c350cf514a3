#include "csrc/ops/decode/flash_decode.h"

#include <algorithm>
#include <array>

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/decode/flash_decode_call.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/runtime/callbacks.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
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
int64_t keys_read(const FlashFwdOptions& o, const FlashFwdCall& call) {
  int64_t keys = call.kv_length;
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

// A tensor of flash_decode's results, with a dimension of splits behind that of queries.
Tensor empty_partial(const FlashDecodeCall& call, const Tensor& like, int64_t columns) {
  const FlashFwdCall& f = call.forward;
  Dims sizes{f.batch, f.heads, f.q_length, call.splits};
  if (columns > 0) {
    sizes.push_back(columns);
  }
  return new_empty(like, sizes, ScalarType::Float);
}

Defines defines_of(const FlashDecodeCall& call, const FlashDecodeAppend* append) {
  Defines defines = flash_decode_defines(call.specialisation, call.splits > 1);
  if (append != nullptr) {
    defines.append(append->defines.begin(), append->defines.end());
  }
  return defines;
}

void launch(const FlashDecodeCall& call, const FlashFwdArguments& a,
            const FlashDecodeAppend* append, const Tensor& out, const Tensor& lse,
            Backend& backend) {
  const bool split = call.splits > 1;
  FlashDecodeParams params{};
  params.problem = flash_problem(call.forward, a);
  params.out_strides = row_strides(out);
  params.lse_strides = split ? row_strides(lse) : statistics_strides(lse);
  params.out_split_stride = split ? out.stride(3) : 0;
  params.lse_split_stride = split ? lse.stride(3) : 0;
  Launch launch;
  launch.program.family = "flash_decode";
  launch.kernel = "flash_decode";
  launch.program.defines = defines_of(call, append);
  launch.buffers = flash_inputs(call.forward, a);
  if (append != nullptr) {
    for (BufferArgument& buffer : launch.buffers) {
      buffer.writable = buffer.slot == FLASH_K || buffer.slot == FLASH_V ||
                        buffer.slot == FLASH_K_SCALE || buffer.slot == FLASH_V_SCALE;
    }
    launch.buffers.push_back({FLASH_DECODE_NEW_K, append->k, false});
    launch.buffers.push_back({FLASH_DECODE_NEW_V, append->v, false});
    params.append = append->params;
    params.q_advances = append->q_advances;
    params.problem.new_keys = append->params.length;
  }
  launch.buffers.push_back({FLASH_DECODE_OUT, out, true});
  launch.buffers.push_back({FLASH_DECODE_LSE, lse, true});
  launch.params_slot = FLASH_PARAMS;
  launch.params.set(params);
  launch.threadgroups = call.threadgroups;
  launch.threads = {static_cast<uint32_t>(call.specialisation.threads()), 1, 1};
  backend.run(launch);
}

}  // namespace

FlashDecodeCall analyse(const FlashDecodeArguments& a, bool aligned) {
  const FlashFwdArguments& f = a.forward;
  FlashDecodeCall call{analyse(f), {}, 1, {}};
  FlashFwdCall& forward = call.forward;
  forward.problem.aligned = forward.problem.aligned && aligned;
  check(0 <= a.num_splits && a.num_splits <= kMaxSplits, "num_splits is ", a.num_splits,
        "; it must be 0 (chosen for you) or in 1..", kMaxSplits);
  check(!forward.problem.features.dropout, "dropout_p is ", f.options.dropout_p,
        "; flash_decode has no dropout: use flash_fwd");
  check(!f.options.k_rotary_cos,
        "k_rotary_cos is given; flash_decode has no rotation of k: rotate it as it enters the "
        "cache, or use flash_fwd");
  if (!forward.launches()) {
    return call;
  }
  call.specialisation = choose_flash_decode(forward.problem, call.rows(), v_in_k(f));
  const int64_t groups = int64_t{forward.batch} * forward.kv_heads;
  call.splits = a.num_splits > 0 ? a.num_splits
                                 : flash_decode_splits(call.specialisation, groups, call.rows(),
                                                       keys_read(f.options, forward), gpu_cores());
  call.threadgroups = {static_cast<uint32_t>(call.splits), static_cast<uint32_t>(forward.kv_heads),
                       static_cast<uint32_t>(forward.batch)};
  return call;
}

std::tuple<Tensor, Tensor> run(const FlashDecodeCall& call, const FlashFwdArguments& a,
                               const FlashDecodeAppend* append, Backend& backend) {
  Tensor out = new_out(a, call.forward.problem.head_dim_v);
  Tensor lse = new_lse(a);
  if (!call.forward.launches()) {
    return {out, lse};
  }
  if (call.splits == 1) {
    launch(call, a, append, out, lse, backend);
  } else {
    const Tensor partial_out = empty_partial(call, a.q, call.specialisation.head_dim_v);
    const Tensor partial_lse = empty_partial(call, a.q, 0);
    launch(call, a, append, partial_out, partial_lse, backend);
    merge_splits(partial_out, partial_lse, a.options.learnable_sink, out, lse, backend);
  }
  return {out, lse};
}

std::string explain(const FlashDecodeCall& call, const FlashFwdArguments& a,
                    const FlashDecodeAppend* append) {
  if (!call.forward.launches()) {
    return JsonObject()
        .add("kernel", "flash_decode")
        .add("reason", "nothing to compute: q is empty, so no kernel is launched")
        .text();
  }
  const FlashDecodeSpecialisation& s = call.specialisation;
  return JsonObject()
      .add("kernel", "flash_decode")
      .add("defines", defines_of(call, append))
      .add("grid", call.threadgroups)
      .add("threads", std::array<uint32_t, 3>{static_cast<uint32_t>(s.threads()), 1, 1})
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers())
      .add("splits", call.splits)
      .add("backend", a.q.is_cpu() ? "simulator" : "mps")
      .add("reason", describe_choice(s, call.rows(), call.splits))
      .text();
}

std::tuple<Tensor, Tensor> flash_decode(const FlashDecodeArguments& a, Backend& backend) {
  return run(analyse(a, true), a.forward, nullptr, backend);
}

std::string flash_decode_explain(const FlashDecodeArguments& a) {
  return explain(analyse(a, true), a.forward, nullptr);
}

}  // namespace metal_attn
