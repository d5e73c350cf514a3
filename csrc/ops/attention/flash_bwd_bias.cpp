#include "csrc/ops/attention/flash_bwd_bias.h"

#include <torch/csrc/stable/ops.h>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/problem/strides.h"
#include "shaders/params/backward.h"

namespace metal_attn {
namespace {

struct FlashBwdBiasCall {
  FlashFwdCall forward;
  FlashBwdSpecialisation specialisation;
  Tensor like;                   // the bias or the slopes
  std::array<int64_t, 4> sizes;  // of `like`, broadcast to (batch, head, query, key)
  bool slopes;
  bool normalised;
  int64_t splits = 1;
  int64_t split_tiles = 0;
  int64_t shared_tiles = 1;
  Extent threadgroups{};

  bool launches() const { return like.numel() > 0 && shared_tiles > 0; }
  bool direct() const { return splits == 1; }
  Element element() const {
    return slopes || !direct() ? Element::kFloat : forward.problem.features.bias->element;
  }
};

std::array<int64_t, 4> bias_sizes(const Tensor& bias) {
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  const int64_t rank = bias.dim();
  for (int64_t dim = 0; dim < rank; ++dim) {
    sizes[static_cast<std::size_t>(4 - rank + dim)] = bias.size(dim);
  }
  return sizes;
}

std::array<int64_t, 4> slope_sizes(const Tensor& slopes) {
  return {slopes.dim() == 2 ? slopes.size(0) : 1, slopes.size(slopes.dim() - 1), 1, 1};
}

FlashBwdBiasCall check_and_choose(const FlashBwdBiasArguments& a, bool slopes) {
  const FlashFwdArguments& f = a.forward;
  const FlashFwdCall forward = check_score_gradient(a);
  check(
      slopes || forward.bias,
      "`attn_bias` is None and `attn_mask` is not floating; pass the bias whose gradient you need");
  check(!slopes || f.options.alibi_slopes,
        "`alibi_slopes` is None; pass the slopes whose gradient you need");

  const FlashBwdSpecialisation specialisation =
      choose_flash_bwd(forward.problem, Gradient::kScores, false, false, gpu());
  const Tensor& like = slopes ? *f.options.alibi_slopes : *forward.bias;
  const auto sizes = slopes ? slope_sizes(like) : bias_sizes(like);
  FlashBwdBiasCall call{forward, specialisation, like, sizes, slopes, a.normalisers.has_value()};

  // If a dimension of the tensor has size 1, the tiles along this dimension share an element.
  const std::array<int64_t, 4> all{forward.batch, forward.heads,
                                   divide_up(forward.q_length, specialisation.block_rows()),
                                   divide_up(forward.kv_length, specialisation.block)};
  std::array<int64_t, 4> owned{};
  double shared = 1.0;
  for (std::size_t dim = 0; dim < 4; ++dim) {
    const bool is_shared = call.sizes[dim] == 1;
    owned[dim] = is_shared ? 1 : all[dim];
    shared *= is_shared ? static_cast<double>(all[dim]) : 1.0;
    call.shared_tiles *= is_shared ? all[dim] : 1;
  }
  constexpr double kMaxTiles = 4e18;
  check(shared < kMaxTiles, "`q` has ", shared,
        " tiles of scores that share one element of a tensor; there must be fewer than 2^62");
  if (f.q.numel() == 0 || f.k.numel() == 0) { call.shared_tiles = 0; }
  const double owned_tiles = double(owned[0]) * owned[1] * owned[2] * owned[3];
  call.splits = score_gradient_splits(static_cast<int64_t>(std::min(owned_tiles, double{1 << 30})),
                                      call.shared_tiles);
  call.split_tiles = divide_up(call.shared_tiles, call.splits);
  // Metal counts positions in the grid in threads, in 32 bits.
  const double columns = double(owned[3]) * call.splits * specialisation.threads();
  constexpr double kMaxGrid = std::numeric_limits<int32_t>::max();
  check(columns <= kMaxGrid && double(owned[0]) * owned[1] <= kMaxGrid,
        slopes ? "`alibi_slopes`" : "`attn_bias`", " has shape ", shape_text(like),
        "; the grid of its gradient must have fewer than 2^31 threads");
  call.threadgroups = extent(owned[3] * call.splits, owned[2], owned[0] * owned[1]);
  return call;
}

Defines defines_of(const FlashBwdBiasCall& call) {
  Defines defines = flash_bwd_defines(call.specialisation);
  defines.push_back({"DBIAS_ELEMENT", element_name(call.element())});
  defines.push_back({"DBIAS_PAIRS", call.sizes[3] % 2 == 0});
  defines.push_back({"QUERIES_SHARED", call.sizes[2] == 1});
  defines.push_back({"KEYS_SHARED", call.sizes[3] == 1});
  define_if(call.slopes, defines, "ALIBI_SLOPE_GRADIENT");
  define_if(call.normalised, defines, "NORMALISED");
  return defines;
}

FlashBwdBiasParams params_of(const FlashBwdBiasCall& call, const FlashBwdBiasArguments& a) {
  FlashBwdBiasParams params{};
  params.problem = flash_problem(call.forward, a.forward);
  params.dout_strides = row_strides(a.dout);
  params.lse_strides = statistics_strides(a.softmax_lse);
  const auto& sizes = call.sizes;
  params.dbias_strides = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  params.split_stride = sizes[0] * params.dbias_strides.batch;
  params.split_tiles = call.split_tiles;
  params.shared_tiles = call.shared_tiles;
  params.splits = static_cast<int32_t>(call.splits);
  params.heads = call.forward.heads;
  params.batches_shared = sizes[0] == 1;
  params.heads_shared = sizes[1] == 1;
  params.own_heads = static_cast<int32_t>(sizes[1]);
  return params;
}

Tensor run(const FlashBwdBiasArguments& a, bool slopes, Backend& backend) {
  const FlashBwdBiasCall call = check_and_choose(a, slopes);
  const Tensor& like = call.like;
  if (!call.launches()) { return new_zeros(like, sizes_of(like), like.scalar_type()); }
  Dims sizes;
  if (!call.direct()) { sizes.push_back(call.splits); }
  sizes.append(like.sizes().begin(), like.sizes().end());
  Tensor result = new_empty(like, sizes, call.direct() ? like.scalar_type() : ScalarType::Float);
  Launch launch("flash_bwd_bias", defines_of(call));
  launch.buffers = score_gradient_buffers(call.forward, a, result);
  launch.set_params(FLASH_PARAMS, params_of(call, a));
  launch.threadgroups = call.threadgroups;
  const FlashBwdSpecialisation& s = call.specialisation;
  launch.threads = extent(s.threads());
  launch.work.threadgroup = double(call.split_tiles) * s.block_rows() * s.block *
                            pair_work(s.features, s.head_dim_qk + s.head_dim_v);
  note(backend,
       [&] { return score_gradient_note(call.specialisation).add("splits", call.splits); });
  run_chosen(backend, launch, call.specialisation, call.forward.q_length, call.forward.kv_length);
  if (call.direct()) { return result; }
  const std::array<int64_t, 1> parts{0};
  return torch::stable::to(torch::stable::sum(result, IntHeaderOnlyArrayRef(parts)),
                           like.scalar_type());
}

}  // namespace

// Returns no more parts than keep the GPU busy. Each part writes a float32 copy of the tensor, and
// all copies together have less than twice kBusyThreadgroups tiles.
int64_t score_gradient_splits(int64_t owned, int64_t shared) {
  if (owned == 0 || shared == 0) { return 1; }
  // This many threadgroups of four SIMD groups keep the largest GPU, which has 80 cores, busy.
  constexpr int64_t kBusyThreadgroups = 80 * kSimdgroupsPerCore / 4;
  return std::min(shared, (kBusyThreadgroups + owned - 1) / owned);
}

JsonObject score_gradient_note(const FlashBwdSpecialisation& s) {
  return JsonObject()
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("registers", s.registers());
}

FlashFwdCall check_score_gradient(const FlashBwdBiasArguments& a) {
  const FlashFwdArguments& f = a.forward;
  FlashFwdCall call = check_differentiable(f);
  check_like_out("dout", a.dout, f);
  bool& long_offsets = call.problem.features.long_offsets;
  long_offsets = long_offsets || has_long_offsets(a.dout);
  const OptionalTensor lse = a.softmax_lse;
  const OptionalTensor delta = a.delta;
  for (const auto& [name, tensor] :
       present({{"softmax_lse", &lse}, {"delta", &delta}, {"normalisers", &a.normalisers}})) {
    check_statistics(name, *tensor, f);
    check_contiguous(name, *tensor);
  }
  return call;
}

Buffers score_gradient_buffers(const FlashFwdCall& call, const FlashBwdBiasArguments& a,
                               const Tensor& result) {
  Buffers buffers = flash_inputs(call, a.forward);
  buffers.push_back({FLASH_BWD_LSE, a.softmax_lse, false});
  buffers.push_back({FLASH_BWD_DOUT, a.dout, false});
  buffers.push_back({FLASH_BWD_DELTA, a.delta, false});
  read_if(a.normalisers, buffers, FLASH_BWD_NORMALISERS);
  buffers.push_back({FLASH_BWD_DBIAS, result, true});
  return buffers;
}

Tensor flash_bwd_bias(const FlashBwdBiasArguments& a, Backend& backend) {
  return with_tiles_that_run([&] { return run(a, false, backend); });
}

Tensor flash_bwd_slopes(const FlashBwdBiasArguments& a, Backend& backend) {
  return with_tiles_that_run([&] { return run(a, true, backend); });
}

}  // namespace metal_attn
