#include "csrc/ops/flash_fwd.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <numbers>
#include <vector>

#include "csrc/ops/allocate.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/flash_fwd_call.h"
#include "csrc/ops/json.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor empty_out(const FlashFwdArguments& a) {
  const auto q_sizes = a.q.sizes();
  std::vector<int64_t> sizes(q_sizes.begin(), q_sizes.end());
  sizes.back() = a.v.size(a.v.dim() - 1);
  return new_empty_strided(a.q, sizes, strides_like(a.q, sizes));
}

Tensor empty_lse(const FlashFwdArguments& a) {
  std::vector<int64_t> sizes{a.q.size(0), a.q.size(1)};
  if (a.packing) {
    std::swap(sizes[0], sizes[1]);
  } else {
    sizes.push_back(a.q.size(2));
  }
  return torch::stable::new_empty(a.q, IntHeaderOnlyArrayRef(sizes), ScalarType::Float);
}

// Of a dense (B, H, L, D) or a packed (T, H, D) tensor.
RowStrides row_strides(const Tensor& tensor) {
  if (tensor.dim() == 3) {
    return {0, tensor.stride(1), tensor.stride(0)};
  }
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

RowStrides lse_strides(const Tensor& lse) {
  if (lse.dim() == 2) {
    return {0, lse.stride(0), 1};
  }
  return {lse.stride(0), lse.stride(1), 1};
}

MaskStrides mask_strides(const std::optional<Tensor>& mask) {
  std::array<int64_t, 4> strides{};
  if (mask) {
    const int64_t rank = mask->dim();
    for (int64_t dim = 0; dim < rank; ++dim) {
      const std::size_t i = static_cast<std::size_t>(4 - rank + dim);
      strides[i] = mask->size(dim) == 1 ? 0 : mask->stride(dim);
    }
  }
  return {strides[0], strides[1], strides[2], strides[3]};
}

TableStrides table_strides(const std::optional<Tensor>& table) {
  if (!table) {
    return {};
  }
  const bool shared = table->dim() == 2 || table->size(0) == 1;
  return {shared ? 0 : table->stride(0), table->stride(table->dim() - 2)};
}

FlashFwdParams params_of(const FlashFwdCall& call, const FlashFwdArguments& a, const Tensor& out,
                         const Tensor& lse) {
  const FlashFwdOptions& o = a.options;
  FlashFwdParams params{};
  params.q_strides = row_strides(a.q);
  params.k_strides = row_strides(a.k);
  params.v_strides = row_strides(a.v);
  params.out_strides = row_strides(out);
  params.lse_strides = lse_strides(lse);
  params.mask_strides = mask_strides(call.mask);
  params.bias_strides = mask_strides(call.bias);
  params.q_cos_strides = table_strides(o.q_rotary_cos);
  params.q_sin_strides = table_strides(o.q_rotary_sin);
  params.k_cos_strides = table_strides(o.k_rotary_cos);
  params.k_sin_strides = table_strides(o.k_rotary_sin);
  if (o.alibi_slopes && o.alibi_slopes->dim() == 2) {
    params.alibi_batch_stride = o.alibi_slopes->stride(0);
  }
  params.q_offset = o.q_offset.value_or(0);
  params.bottom_right = !o.q_offset;
  // Lengths and offsets stay below 2^31, so 2^33 is no limit, and sums of it stay in 64 bits.
  const auto window = [](int64_t size) {
    return size < 0 ? int64_t{NO_WINDOW} : std::min(size, int64_t{1} << 33);
  };
  params.window_left = window(o.window_size_left);
  params.window_right = o.causal ? 0 : window(o.window_size_right);
  params.batch = call.batch;
  params.q_length = call.q_length;
  params.kv_length = call.kv_length;
  params.q_total = call.q_total;
  params.kv_total = call.kv_total;
  params.queries_per_kv = call.heads / call.kv_heads;
  params.chunk = static_cast<int32_t>(o.attention_chunk);
  params.scale_log2 = static_cast<float>(call.scale * std::numbers::log2e);
  if (o.softcap > 0.0) {
    params.scale_over_cap = static_cast<float>(call.scale / o.softcap);
    params.cap_log2 = static_cast<float>(o.softcap * std::numbers::log2e);
  }
  return params;
}

std::vector<BufferArgument> buffers_of(const FlashFwdCall& call, const FlashFwdArguments& a,
                                       const Tensor& out, const Tensor& lse) {
  std::vector<BufferArgument> buffers;
  // Where there are no keys a tensor may have no memory: what is not read may as well be q.
  const auto read = [&](uint32_t slot, const std::optional<Tensor>& tensor) {
    if (tensor) {
      buffers.push_back({slot, tensor->numel() > 0 ? *tensor : a.q, false});
    }
  };
  const FlashFwdOptions& o = a.options;
  read(FLASH_FWD_Q, a.q);
  read(FLASH_FWD_K, a.k);
  read(FLASH_FWD_V, a.v);
  buffers.push_back({FLASH_FWD_OUT, out, true});
  buffers.push_back({FLASH_FWD_LSE, lse, true});
  if (a.packing) {
    read(FLASH_FWD_CU_SEQLENS_Q, a.packing->cu_seqlens_q);
    read(FLASH_FWD_CU_SEQLENS_K, a.packing->cu_seqlens_k);
  }
  read(FLASH_FWD_SEQUSED_K, o.seqused_k);
  read(FLASH_FWD_LEFTPAD_K, o.leftpad_k);
  read(FLASH_FWD_MASK, call.mask);
  read(FLASH_FWD_BIAS, call.bias);
  read(FLASH_FWD_ALIBI_SLOPES, o.alibi_slopes);
  read(FLASH_FWD_SINK, o.learnable_sink);
  read(FLASH_FWD_Q_COS, o.q_rotary_cos);
  read(FLASH_FWD_Q_SIN, o.q_rotary_sin);
  read(FLASH_FWD_K_COS, o.k_rotary_cos);
  read(FLASH_FWD_K_SIN, o.k_rotary_sin);
  return buffers;
}

}  // namespace

std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& a, Backend& backend) {
  const FlashFwdCall call = analyse(a);
  Tensor out = empty_out(a);
  Tensor lse = empty_lse(a);
  if (call.launches()) {
    Launch launch;
    launch.family = "flash_fwd";
    launch.kernel = "flash_fwd";
    launch.defines = flash_fwd_defines(call.specialisation);
    launch.buffers = buffers_of(call, a, out, lse);
    launch.params_slot = FLASH_FWD_PARAMS;
    launch.params = params_bytes(params_of(call, a, out, lse));
    launch.threadgroups = call.threadgroups;
    launch.threads = {static_cast<uint32_t>(call.specialisation.threads()), 1, 1};
    backend.run(launch);
  }
  return {out, lse};
}

std::string flash_fwd_explain(const FlashFwdArguments& a) {
  const FlashFwdCall call = analyse(a);
  const FlashFwdSpecialisation& s = call.specialisation;
  const bool launches = call.launches();
  return JsonObject()
      .add("kernel", "flash_fwd")
      .add("defines", flash_fwd_defines(s))
      .add("grid", launches ? call.threadgroups : std::array<uint32_t, 3>{})
      .add("threads", std::array<uint32_t, 3>{static_cast<uint32_t>(s.threads()), 1, 1})
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers())
      .add("backend", a.q.is_cpu() ? "simulator" : "mps")
      .add("reason", launches ? describe_choice(s)
                              : "nothing to compute: q is empty, so no kernel is launched")
      .text();
}

}  // namespace metal_attn
