#include <torch/csrc/stable/ops.h>

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/problem/strides.h"
#include "shaders/params/backward.h"

namespace metal_attn {
namespace {

// The most bytes of all copies of a captured tensor, and the most if there is only one split.
constexpr double kCopiesBytes = 64.0 * (1 << 20);
constexpr double kMostBytes = 1024.0 * (1 << 20);

// The gradient of one load of a captured tensor.
struct Share {
  FlashBwdSpecialisation specialisation;
  Tensor capture;
  int64_t owners;
  int64_t q_tiles;
  int64_t owned;   // tiles of queries in the dimensions that own elements
  int64_t shared;  // tiles of queries in the other dimensions
  int64_t splits;
  int64_t copies;

  bool owns(FlexOwner owner) const { return (owners & owner) != 0; }
};

Share check_share(const FlashFwdCall& call, const FlashFwdArguments& f, std::size_t i) {
  const FlexOptions& flex = *f.flex;
  FlashFwdProblem problem = call.problem;
  problem.features.flex = with_share(*problem.features.flex, flex, i);
  const FlashBwdSpecialisation specialisation =
      choose_flash_bwd(problem, Gradient::kScores, false, false, gpu());
  const auto number = static_cast<std::size_t>(flex.share_captures[i]);
  Share share{specialisation, flex.captures[number], flex.share_owners[i], 0, 1, 1, 1, 1};
  const int64_t elements = share.capture.numel();
  check(elements < std::numeric_limits<int32_t>::max(), "captures[", number, "] has ", elements,
        " elements; a captured tensor that has a gradient must have fewer than 2^31 - 1");
  const int64_t block_q = specialisation.block_rows();
  share.q_tiles = divide_up(call.q_length, block_q);
  const std::array<std::pair<FlexOwner, int64_t>, 3> dims{
      {{kOwnBatch, call.batch}, {kOwnHead, call.heads}, {kOwnQuery, share.q_tiles}}};
  for (const auto& [owner, size] : dims) {
    (share.owns(owner) ? share.owned : share.shared) *= size;
  }
  const int64_t simdgroups = share.owns(kOwnQuery) ? 1 : specialisation.simdgroups;
  const double bytes = double(elements) * double(simdgroups) * sizeof(float);
  check(share.owns(kOwnQuery) || bytes <= kMostBytes, "captures[", number, "] has ", elements,
        " elements, and any query may load any of them: the partial sums of its gradient need ",
        bytes / (1 << 20), " MiB and may have at most ", kMostBytes / (1 << 20),
        " MiB: pass a smaller tensor, or detach it");
  const auto room = static_cast<int64_t>(kCopiesBytes / std::max(bytes, 1.0));
  share.splits = std::clamp(score_gradient_splits(share.owned, share.shared), int64_t{1},
                            std::max(room, int64_t{1}));
  share.copies = share.splits * simdgroups;
  constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();
  check(share.owned <= kMaxGrid, "`q` has ", share.owned,
        " tiles of queries in all heads; there must be fewer than 2^31");
  return share;
}

Defines defines_of(const Share& share, bool normalised) {
  Defines defines = flash_bwd_defines(share.specialisation);
  define_if(share.owns(kOwnQuery), defines, "QUERIES_OWNED");
  define_if(share.owns(kOwnQuery) && share.owns(kOwnKey), defines, "PLACES_DIFFER");
  define_if(normalised, defines, "NORMALISED");
  return defines;
}

Launch launch_of(const FlashFwdCall& call, const FlashBwdBiasArguments& a, const Share& share,
                 const Tensor& copies) {
  Launch launch("flash_bwd_captures", defines_of(share, a.normalisers.has_value()));
  launch.buffers = score_gradient_buffers(call, a, copies);
  append_block_lists(launch.buffers, a.forward, FlexWalk::kOverKeys);

  FlashBwdCaptureParams params{};
  params.problem = flash_problem(call, a.forward);
  params.dout_strides = row_strides(a.dout);
  params.lse_strides = statistics_strides(a.softmax_lse);
  params.elements = share.capture.numel();
  params.split_tiles = divide_up(share.shared, share.splits);
  params.shared_tiles = share.shared;
  params.heads = call.heads;
  params.q_tiles = static_cast<int32_t>(share.q_tiles);
  params.batches_owned = share.owns(kOwnBatch);
  params.heads_owned = share.owns(kOwnHead);
  launch.set_params(FLASH_PARAMS, params);
  launch.threadgroups = extent(share.splits, share.owned);
  const FlashBwdSpecialisation& s = share.specialisation;
  launch.threads = extent(s.threads());
  launch.work.threadgroup = double(params.split_tiles) * s.block_rows() *
                            double(keys_seen(a.forward, call, s.block_rows())) *
                            pair_work(s.features, s.head_dim_qk + s.head_dim_v);
  return launch;
}

Tensor run(const FlashFwdCall& call, const FlashBwdBiasArguments& a, std::size_t i,
           Backend& backend) {
  const Share share = check_share(call, a.forward, i);
  const Tensor copies =
      new_zeros(share.capture, {share.copies, share.capture.numel()}, ScalarType::Float);
  if (a.forward.q.numel() > 0 && a.forward.k.numel() > 0) {
    note(backend, [&] {
      return score_gradient_note(share.specialisation).add("share", static_cast<int64_t>(i));
    });
    run_chosen(backend, launch_of(call, a, share, copies), share.specialisation, call.q_length,
               call.kv_length);
  }
  const std::array<int64_t, 1> each{0};
  const Tensor sum = torch::stable::sum(copies, IntHeaderOnlyArrayRef(each));
  return torch::stable::view(sum, share.capture.sizes());
}

}  // namespace

std::vector<Tensor> flash_bwd_captures(const FlashBwdBiasArguments& a, Backend& backend) {
  const FlashFwdCall call = check_score_gradient(a);
  check_shares(*a.forward.flex);
  std::vector<Tensor> gradients;
  for (std::size_t i = 0; i < a.forward.flex->shares.size(); ++i) {
    gradients.push_back(with_tiles_that_run([&] { return run(call, a, i, backend); }));
  }
  return gradients;
}

}  // namespace metal_attn
