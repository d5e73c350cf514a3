#include "csrc/ops/attention/flash_bwd.h"

#include <cmath>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/defines.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/mask_blocks.h"
#include "csrc/ops/attention/tensor_tiles.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/problem/strides.h"
#include "shaders/params/backward.h"

namespace metal_attn {
namespace {

// SIMD groups per threadgroup in flash_bwd_delta and flash_bwd_sum. Each SIMD group has one row.
constexpr int kRowSimdgroups = 4;

struct FlashBwdCall {
  FlashFwdCall forward;
  FlashBwdSpecialisation dq;
  FlashBwdSpecialisation dkv;
};

MaskTile mask_tile(const FlashBwdSpecialisation& s) {
  return {s.tile_queries(), s.tile_keys(), s.dkv() ? FlexWalk::kOverQueries : FlexWalk::kOverKeys};
}

// The estimated time of dk and dv with `splits`, divided by the time of the products alone. The
// factor is above 1 because of idle cores and because the splits must be added up.
double grid_factor(const FlashBwdSpecialisation& s, int splits, const FlashFwdProblem& problem,
                   const Gpu& gpu) {
  const double tiles = double(problem.keys) / s.block_rows();
  const double waves =
      tiles * s.slices() * s.simdgroups * splits / double(kSimdgroupsPerCore * gpu.cores);
  // With a band some tiles are shorter, and only later tiles can use the idle cores.
  const double uneven = s.features.band ? 1.0 + std::max(2.0 - waves, 0.0) / 2 : 1.0;
  // Two thirds of the SIMD groups still do more than two thirds of the work (replay.md).
  constexpr double kExponent = 0.85;
  const double idle = uneven / std::pow(std::min(waves, 1.0), kExponent);
  // Writing and adding up the partial results of a key takes as long as this many queries. The
  // estimates use 68 GB/s and 2.6 TFLOPS (M1), and 269 GB/s and 32 TFLOPS (M5 Pro's matrix units).
  const double part_queries = s.tensor_tiles ? 250 : 80;
  const double queries = double(problem.q_length) * problem.queries_per_kv;
  return splits > 1 ? idle * (1.0 + part_queries * splits / queries) : idle;
}

// The number of threadgroups that share the query heads of a KV head, a divisor of queries_per_kv.
int choose_head_splits(const FlashBwdSpecialisation& s, const FlashFwdProblem& problem,
                       const Gpu& gpu) {
  int best = 1;
  if (!s.dkv() || problem.q_length == 0 || problem.keys == 0) { return best; }
  for (int splits = 2; splits <= problem.queries_per_kv; ++splits) {
    if (problem.queries_per_kv % splits == 0 &&
        grid_factor(s, splits, problem, gpu) < grid_factor(s, best, problem, gpu)) {
      best = splits;
    }
  }
  return best;
}

Extent threadgroups_of(const FlashFwdCall& call, const FlashBwdSpecialisation& s) {
  const GridRows q{"q", call.q_length, call.heads, s.slices()};
  const GridRows k{"k", call.kv_length, call.kv_heads, s.head_splits * s.slices()};
  const int listed = s.dkv() ? s.features.kv_block() : s.features.q_block();
  return check_grid(call, s.dkv() ? k : q,
                    {s.block_rows(), listed, s.features.ordered(), s.threads()});
}

FlashBwdCall check_and_choose(const FlashBwdArguments& a, bool tensor_tiles) {
  const FlashFwdArguments& f = a.forward;
  FlashBwdCall call{check_differentiable(f), {}, {}};
  check_like_out("out", a.out, f);
  check_like_out("dout", a.dout, f);
  check_statistics("softmax_lse", a.softmax_lse, f);
  check_contiguous("softmax_lse", a.softmax_lse);
  if (f.flex) { check_flex_gradients(*f.flex); }
  if (a.dlse) { check_statistics("dlse", *a.dlse, f); }

  FlashFwdFeatures& features = call.forward.problem.features;
  features.mask_blocks = skips_mask_blocks(call.forward);
  features.long_offsets =
      features.long_offsets || has_long_offsets(a.dout) || has_long_offsets(a.dlse);
  FlashFwdProblem problem = call.forward.problem;
  problem.aligned = problem.aligned && rows_aligned_16(f.q) && rows_aligned_16(a.dout);
  bool tensor = tensor_tiles && no_tensor_gradients(problem) == nullptr;
  const auto choose = [&](Gradient gradient) {
    return tuned(choose_flash_bwd(problem, gradient, a.exact_delta, tensor, gpu()),
                 call.forward.q_length, call.forward.kv_length);
  };
  // dq has the same kind of tile as dk and dv, which need the delta of the same products.
  if (tensor && refused_tiles() != nullptr) {
    tensor = !choose(Gradient::kQ).refused && !choose(Gradient::kKv).refused;
  }
  call.dq = choose(Gradient::kQ);
  if (!tensor && f.flex) {
    problem.features.flex->ordered = starts_in_order(*f.flex, FlexWalk::kOverQueries);
  }
  call.dkv = choose(Gradient::kKv);
  call.dkv.head_splits = choose_head_splits(call.dkv, problem, gpu());
  for (const FlashBwdSpecialisation* s : {&call.dq, &call.dkv}) {
    threadgroups_of(call.forward, *s);  // throws before anything is launched
  }
  return call;
}

Work work_of(const FlashBwdCall& call, const FlashFwdArguments& f, const FlashBwdSpecialisation& s,
             const Extent& threadgroups) {
  const FlashFwdCall& forward = call.forward;
  const int rows = s.block_rows();
  const int heads = s.dkv() ? forward.problem.queries_per_kv / s.head_splits : 1;
  const int64_t opposite_rows =
      heads * (s.dkv() ? queries_seeing(f, forward, rows) : keys_seen(f, forward, rows));
  const int columns = s.head_dim_qk + s.head_dim_v + s.qk_slice() + (s.dkv() ? s.v_slice() : 0);
  const int64_t total = s.dkv() ? forward.kv_total : forward.q_total;
  return {double(rows) * double(opposite_rows) * pair_work(s.features, columns),
          busy_threadgroups(forward, total, rows, threadgroups[1])};
}

FlashBwdParams params_of(const FlashBwdCall& call, const FlashBwdArguments& a, const Tensor& delta,
                         const Tensor& dq) {
  FlashBwdParams params{};
  params.problem = flash_problem(call.forward, a.forward);
  params.out_strides = row_strides(a.out);
  params.dout_strides = row_strides(a.dout);
  params.dq_strides = row_strides(dq);
  params.lse_strides = statistics_strides(delta);
  if (a.dlse) { params.dlse_strides = statistics_strides(*a.dlse); }
  return params;
}

Launch delta_launch(const FlashBwdCall& call, const FlashBwdArguments& a, const Tensor& delta,
                    const FlashBwdParams& params) {
  const FlashFwdProblem& problem = call.forward.problem;
  Launch launch("flash_bwd_delta", {{"ELEMENT", element_name(problem.element)},
                                    {"HEAD_DIM_V", problem.head_dim_v},
                                    {"SIMDGROUPS", kRowSimdgroups}});
  launch.buffers = {{FLASH_BWD_OUT, a.out, false}, {FLASH_BWD_DOUT, a.dout, false}};
  define_if(a.dlse.has_value(), launch.program.defines, "DLSE");
  read_if(a.dlse, launch.buffers, FLASH_BWD_DLSE);
  launch.buffers.push_back({FLASH_BWD_DELTA, delta, true});
  launch.set_params(FLASH_PARAMS, params);
  launch.threadgroups = extent(divide_up(params.problem.q_total, kRowSimdgroups),
                               call.forward.heads, a.forward.packing ? 1 : call.forward.batch);
  launch.threads = extent(kSimdgroupThreads * kRowSimdgroups);
  return launch;
}

// Partial gradients of k or v, one for each split of the query heads.
Tensor new_parts(const Tensor& gradient, int splits) {
  Dims sizes = sizes_of(gradient);
  sizes[0] *= splits;
  return new_empty(gradient, sizes, ScalarType::Float);
}

Launch sum_launch(const FlashBwdCall& call, const Tensor& parts, const Tensor& sums) {
  const FlashFwdProblem& problem = call.forward.problem;
  const bool packed = problem.features.varlen;
  FlashBwdSumParams params{};
  params.part_strides = row_strides(parts);
  params.sum_strides = row_strides(sums);
  params.split_stride = sums.numel();
  params.splits = call.dkv.head_splits;
  params.rows = static_cast<int32_t>(sums.size(packed ? 0 : 2));
  Launch launch("flash_bwd_sum", {{"ELEMENT", element_name(problem.element)},
                                  {"HEAD_DIM", static_cast<int>(sums.size(sums.dim() - 1))},
                                  {"SIMDGROUPS", kRowSimdgroups}});
  launch.buffers = {{FLASH_BWD_SUM_PARTS, parts, false}, {FLASH_BWD_SUM_RESULT, sums, true}};
  launch.set_params(FLASH_PARAMS, params);
  launch.threadgroups = extent(divide_up(params.rows, kRowSimdgroups), call.forward.kv_heads,
                               packed ? 1 : sums.size(0));
  launch.threads = extent(kSimdgroupThreads * kRowSimdgroups);
  return launch;
}

Launch gradient_launch(const FlashBwdSpecialisation& s, const FlashBwdCall& call,
                       const FlashBwdArguments& a, const Tensor& delta,
                       const std::optional<MaskBlocks>& lists, FlashBwdParams params) {
  const FlexWalk walk = mask_tile(s).walk;
  Launch launch(s.kernel(), flash_bwd_defines(s));
  launch.buffers = flash_inputs(call.forward, a.forward);
  append_block_lists(launch.buffers, a.forward, walk);
  if (a.forward.flex) { params.problem.flex = flex_params(*a.forward.flex, walk); }
  bind_mask_blocks(lists, launch.buffers, params.problem);
  // Without queries these tensors have no memory, and the kernel does not read them.
  const auto read = [&](uint32_t slot, const Tensor& tensor) {
    launch.buffers.push_back({slot, tensor.numel() > 0 ? tensor : a.forward.k, false});
  };
  read(FLASH_BWD_DOUT, a.dout);
  read(FLASH_BWD_LSE, a.softmax_lse);
  read(FLASH_BWD_DELTA, delta);
  launch.set_params(FLASH_PARAMS, params);
  launch.threads = extent(s.threads());
  return launch;
}

JsonObject note_of(const FlashFwdCall& call, const FlashBwdSpecialisation& s, const Tensor& q) {
  const std::string problem = tensor_tiles_problem(q, Pass::kBackward);
  const char* why_not = no_tensor_gradients(call.problem);
  if (why_not == nullptr && problem.empty() && !s.tensor_tiles) { why_not = kTensorTilesRefused; }
  return tile_note(s, call.q_length, call.kv_length)
      .add("head_splits", s.head_splits)
      .add("reason",
           joined({missing_tensor_tiles(why_not, problem), describe_tf32(s.element, s.tensor_tiles),
                   describe_mask_blocks(call, mask_tile(s))}));
}

FlashGradients run(const FlashBwdArguments& a, Backend& backend, bool tensor_tiles) {
  const FlashBwdCall call = check_and_choose(a, tensor_tiles);
  const FlashFwdArguments& f = a.forward;
  Tensor dq = new_empty_like(f.q);
  Tensor dk = new_empty_like(f.k);
  Tensor dv = new_empty_like(f.v);
  const auto new_statistics = [&a] {
    return new_empty(a.softmax_lse, sizes_of(a.softmax_lse), ScalarType::Float);
  };
  const Tensor rounded_delta = new_statistics();
  const Tensor delta = a.exact_delta ? new_statistics() : rounded_delta;
  const Tensor normalisers = call.dq.normalised()
                                 ? new_statistics()
                                 : new_empty(a.softmax_lse, Dims{0}, ScalarType::Float);
  const FlashBwdParams params = params_of(call, a, delta, dq);
  const auto lists_for = [&](const FlashBwdSpecialisation& s) {
    return list_mask_blocks(call.forward, s.features, mask_tile(s), backend);
  };
  const auto run_gradient = [&](Launch& launch, const FlashBwdSpecialisation& s) {
    launch.threadgroups = threadgroups_of(call.forward, s);
    launch.work = work_of(call, f, s, launch.threadgroups);
    append_block_order(launch, f, mask_tile(s).walk);
    note(backend, [&] { return note_of(call.forward, s, f.q); });
    run_chosen(backend, launch, s, call.forward.q_length, call.forward.kv_length);
  };
  if (dq.numel() > 0) {
    backend.run(delta_launch(call, a, rounded_delta, params));
    const auto lists = lists_for(call.dq);
    Launch launch = gradient_launch(call.dq, call, a, rounded_delta, lists, params);
    launch.buffers.push_back({FLASH_BWD_DQ, dq, true});
    if (a.exact_delta) {
      launch.buffers.push_back({FLASH_BWD_EXACT_DELTA, delta, true});
      define_if(a.dlse.has_value(), launch.program.defines, "DLSE");
      read_if(a.dlse, launch.buffers, FLASH_BWD_DLSE);
    }
    if (call.dq.normalised()) {
      launch.buffers.push_back({FLASH_BWD_NORMALISERS, normalisers, true});
    }
    run_gradient(launch, call.dq);
  }
  if (dk.numel() > 0) {
    const int splits = call.dkv.head_splits;
    const Tensor dk_parts = splits > 1 ? new_parts(dk, splits) : dk;
    const Tensor dv_parts = splits > 1 ? new_parts(dv, splits) : dv;
    FlashBwdParams dkv_params = params;
    dkv_params.dk_strides = row_strides(dk_parts);
    dkv_params.dv_strides = row_strides(dv_parts);
    dkv_params.dk_split_stride = dk.numel();
    dkv_params.dv_split_stride = dv.numel();
    const auto lists = lists_for(call.dkv);
    Launch launch = gradient_launch(call.dkv, call, a, delta, lists, dkv_params);
    launch.buffers.push_back({FLASH_BWD_DK, dk_parts, true});
    launch.buffers.push_back({FLASH_BWD_DV, dv_parts, true});
    if (call.dkv.normalised()) {
      // Without queries the tensor has no memory, and the kernel does not read it.
      launch.buffers.push_back(
          {FLASH_BWD_NORMALISERS, normalisers.numel() > 0 ? normalisers : f.k, false});
    }
    run_gradient(launch, call.dkv);
    if (splits > 1) {
      backend.run(sum_launch(call, dk_parts, dk));
      backend.run(sum_launch(call, dv_parts, dv));
    }
  }
  return {dq, dk, dv, delta, normalisers};
}

}  // namespace

FlashFwdCall check_differentiable(const FlashFwdArguments& f) {
  const FlashFwdCall call = check_flash_fwd(f);
  // Also refuses quantised k and v, whose dtypes differ.
  check_same_dtype("k", f.k, "q", f.q);
  check_same_dtype("v", f.v, "q", f.q);
  return call;
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  const bool has_slices = s.gradient != Gradient::kScores;
  Defines specific;
  define_if(has_slices, specific, s.dkv() ? "DK_SLICE" : "DQ_SLICE", s.qk_slice());
  specific.push_back({s.dkv() ? "BLOCK_Q" : "BLOCK_K", s.block});
  specific.push_back({"SIMDGROUPS", s.simdgroups});
  specific.push_back({"ROWS_IN_REGISTERS", s.rows_in_registers});
  define_if(has_slices, specific, "ROW_PAIRS", s.row_pairs);
  define_if(s.dkv(), specific, "DV_SLICE", s.v_slice());
  define_if(s.dkv(), specific, "SLICES", s.slices());
  define_if(s.rows_in_threadgroup, specific, "ROWS_IN_THREADGROUP");
  define_if(s.column_simdgroups > 1, specific, "COLUMN_SIMDGROUPS", s.column_simdgroups);
  define_if(s.head_splits > 1, specific, "HEAD_SPLITS", s.head_splits);
  define_if(s.exact_delta && !s.dkv(), specific, "EXACT_DELTA");
  define_if(s.normalised(), specific, "NORMALISED");
  define_if(s.tiles_shared(), specific, "TILES_SHARED");
  return all_defines(s, specific);
}

FlashGradients flash_bwd(const FlashBwdArguments& a, Backend& backend, bool tensor_tiles) {
  return with_tiles_that_run([&] { return run(a, backend, tensor_tiles); });
}

FlashGradients flash_bwd(const FlashBwdArguments& a, Backend& backend) {
  const FlashFwdArguments& f = a.forward;
  if (f.flex) { return flash_bwd(a, backend, false); }
  return with_tensor_tiles(f.q, backend, Pass::kBackward, "attention's backward of such tensors",
                           [&](bool tensor_tiles) { return flash_bwd(a, backend, tensor_tiles); });
}

}  // namespace metal_attn
