#include "csrc/ops/flash_fwd.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "csrc/ops/allocate.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/heuristics.h"
#include "csrc/ops/json.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Problem {
  FlashFwdSpecialisation specialisation;
  int32_t batch;
  int32_t heads;
  int32_t kv_heads;
  int32_t q_length;
  int32_t kv_length;
  int32_t causal_offset;
  float scale_log2;
  std::array<uint32_t, 3> threadgroups;

  bool has_output() const { return batch > 0 && heads > 0 && q_length > 0; }
  bool launches() const { return has_output() && kv_length > 0; }
};

void check_shapes(const FlashFwdArguments& a) {
  const char* q_layout = "(batch, heads, q_length, head_dim)";
  const char* kv_layout = "(batch, kv_heads, kv_length, head_dim)";
  check_rank("q", a.q, 4, q_layout);
  check_rank("k", a.k, 4, kv_layout);
  check_rank("v", a.v, 4, kv_layout);
  check(a.k.size(0) == a.q.size(0), "k has a batch of ", a.k.size(0), " and q of ", a.q.size(0),
        "; they must be equal");
  check(a.v.size(0) == a.q.size(0), "v has a batch of ", a.v.size(0), " and q of ", a.q.size(0),
        "; they must be equal");
  check(a.v.size(1) == a.k.size(1), "v has ", a.v.size(1), " heads and k ", a.k.size(1),
        "; they must be equal");
  check(a.v.size(2) == a.k.size(2), "v has a length of ", a.v.size(2), " and k of ", a.k.size(2),
        "; they must be equal");
  check(a.k.size(3) == a.q.size(3), "k has a head dim of ", a.k.size(3), " and q of ", a.q.size(3),
        "; they must be equal");
  const int64_t heads = a.q.size(1);
  const int64_t kv_heads = a.k.size(1);
  check(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), "q has ", heads, " heads and k ",
        kv_heads, "; k's must divide q's");
}

float checked_scale_log2(std::optional<double> softmax_scale, int head_dim) {
  const double scale = softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const float scale_log2 = static_cast<float>(scale * std::numbers::log2e);
  check(std::isfinite(scale_log2), "softmax_scale is ", scale, "; it must be finite in float32");
  return scale_log2;
}

// out and softmax_lse must have sizes in bytes that int64 holds: with zero strides, q's need not.
void check_output_size(const Problem& p) {
  const double elements = static_cast<double>(p.batch) * p.heads * p.q_length;
  const double bytes = elements * std::max<double>(p.specialisation.head_dim_v *
                                                       element_bytes(p.specialisation.element),
                                                   sizeof(float));
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "q has ", p.batch, " x ",
        p.heads, " x ", p.q_length, " rows; out would be over 2^63 bytes");
}

std::array<uint32_t, 3> checked_threadgroups(const Problem& p) {
  // Metal's positions in the grid are 32-bit, counted in threads.
  const int64_t block_q = p.specialisation.block_q();
  const int64_t blocks = (p.q_length + block_q - 1) / block_q;
  const int64_t max_blocks = std::numeric_limits<uint32_t>::max() / p.specialisation.threads();
  check(blocks <= max_blocks, "q has a length of ", p.q_length, "; with head dims ",
        p.specialisation.head_dim_qk, " and ", p.specialisation.head_dim_v, " it must be at most ",
        max_blocks * block_q);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(p.heads),
          static_cast<uint32_t>(p.batch)};
}

// Every check, then the choice of kernel.
Problem analyse(const FlashFwdArguments& a) {
  check_device("q", a.q);
  check_device("k", a.k);
  check_device("v", a.v);
  check_same_device("k", a.k, "q", a.q);
  check_same_device("v", a.v, "q", a.q);
  const Element element = check_element("q", a.q);
  check_same_dtype("k", a.k, "q", a.q);
  check_same_dtype("v", a.v, "q", a.q);
  check_shapes(a);

  Problem p{};
  p.batch = check_length("q", a.q, 0, "batch");
  p.heads = check_length("q", a.q, 1, "number of heads");
  p.q_length = check_length("q", a.q, 2, "length");
  p.kv_heads = check_length("k", a.k, 1, "number of heads");
  p.kv_length = check_length("k", a.k, 2, "length");
  const int head_dim_qk = check_head_dim("q", a.q);
  const int head_dim_v = check_head_dim("v", a.v);
  check_last_stride("q", a.q);
  check_last_stride("k", a.k);
  check_last_stride("v", a.v);
  check_storage("q", a.q);
  check_storage("k", a.k);
  check_storage("v", a.v);
  p.scale_log2 = checked_scale_log2(a.softmax_scale, head_dim_qk);

  // From kv_length - 1 on, the first query sees every key and there is no mask; down to -q_length,
  // the last one sees none. So clamping changes nothing and makes any offset fit.
  const int64_t offset =
      std::clamp<int64_t>(a.causal_offset.value_or(p.kv_length), -int64_t{p.q_length}, p.kv_length);
  p.causal_offset = static_cast<int32_t>(offset);
  const bool causal = offset < int64_t{p.kv_length} - 1;
  const bool wide_loads = rows_aligned_16(a.k) && rows_aligned_16(a.v);
  p.specialisation = choose_flash_fwd({element, head_dim_qk, head_dim_v, causal, wide_loads});
  check_output_size(p);
  p.threadgroups = checked_threadgroups(p);
  return p;
}

Tensor empty_out(const FlashFwdArguments& a) {
  const std::vector<int64_t> sizes{a.q.size(0), a.q.size(1), a.q.size(2), a.v.size(3)};
  return new_empty_strided(a.q, sizes, strides_like(a.q, sizes));
}

Tensor empty_lse(const Tensor& q) {
  const std::array<int64_t, 3> sizes{q.size(0), q.size(1), q.size(2)};
  return torch::stable::new_empty(q, IntHeaderOnlyArrayRef(sizes), ScalarType::Float);
}

RowStrides row_strides(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Launch launch_of(const Problem& p, const FlashFwdArguments& a, const Tensor& out,
                 const Tensor& lse) {
  FlashFwdParams params{};
  params.q_strides = row_strides(a.q);
  params.k_strides = row_strides(a.k);
  params.v_strides = row_strides(a.v);
  params.out_strides = row_strides(out);
  params.q_length = p.q_length;
  params.kv_length = p.kv_length;
  params.heads = p.heads;
  params.queries_per_kv = p.heads / p.kv_heads;
  params.causal_offset = p.causal_offset;
  params.scale_log2 = p.scale_log2;

  Launch launch;
  launch.family = "flash_fwd";
  launch.kernel = "flash_fwd";
  launch.defines = flash_fwd_defines(p.specialisation);
  launch.buffers = {{FLASH_FWD_Q, a.q, false},
                    {FLASH_FWD_K, a.k, false},
                    {FLASH_FWD_V, a.v, false},
                    {FLASH_FWD_OUT, out, true},
                    {FLASH_FWD_LSE, lse, true}};
  launch.params_slot = FLASH_FWD_PARAMS;
  launch.params = params_bytes(params);
  launch.threadgroups = p.threadgroups;
  launch.threads = {static_cast<uint32_t>(p.specialisation.threads()), 1, 1};
  return launch;
}

}  // namespace

std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& a, Backend& backend) {
  const Problem p = analyse(a);
  Tensor out = empty_out(a);
  Tensor lse = empty_lse(a.q);
  if (p.launches()) {
    backend.run(launch_of(p, a, out, lse));
  } else if (p.has_output()) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  return {out, lse};
}

std::string flash_fwd_explain(const FlashFwdArguments& a) {
  const Problem p = analyse(a);
  const FlashFwdSpecialisation& s = p.specialisation;
  std::string reason = describe_choice(s);
  if (!p.has_output()) {
    reason = "nothing to compute: q is empty, so no kernel is launched";
  } else if (!p.launches()) {
    reason = "there are no keys: out is zero and softmax_lse -inf, and no kernel is launched";
  }
  const bool launches = p.launches();
  const std::array<uint32_t, 3> threadgroups =
      launches ? p.threadgroups : std::array<uint32_t, 3>{};
  return JsonObject()
      .add("kernel", "flash_fwd")
      .add("defines", flash_fwd_defines(s))
      .add("grid", threadgroups)
      .add("threads", std::array<uint32_t, 3>{static_cast<uint32_t>(s.threads()), 1, 1})
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers())
      .add("backend", a.q.is_cpu() ? "simulator" : "mps")
      .add("reason", reason)
      .text();
}

}  // namespace metal_attn
