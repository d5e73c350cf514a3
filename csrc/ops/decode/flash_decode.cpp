#include "csrc/ops/decode/flash_decode.h"

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/defines.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/ops/cache/check.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/decode/visible.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/problem/strides.h"

namespace metal_attn {
namespace {

// The most keys that the queries of a sequence, or of a list, read.
int64_t keys_read(const FlashDecodeArguments& a, const FlashFwdCall& call) {
  return a.lists.indices ? listed_keys(a.lists) : keys_seen(a.forward, call, call.q_length);
}

// The most waves of threadgroups for which choose_splits tries a number of splits.
constexpr int kMostWaves = 16;

// The estimated time of the launch that merges splits, in keys of a threadgroup.
constexpr int64_t kMergeKeys = 64;

// The bytes of a row of k or v with its scales.
int row_bytes(const FlashDecodeSpecialisation& s, KvFormat kv_format, int columns) {
  constexpr int kScaleBytes = 2;
  const int format = static_cast<int>(kv_format);
  if (kv_format == KvFormat::kPlain) { return columns * element_bytes(s.kv_element()); }
  const int scales =
      kv_row_scales(format) ? columns * kv_scale_numbers(format) / kv_scale_columns(format) : 0;
  return columns * kv_bits(format) / 8 + scales * kScaleBytes;
}

// The bytes of a row of k and v.
int key_bytes(const FlashDecodeSpecialisation& s) {
  const auto [k, v] = s.features.cache.formats;
  return row_bytes(s, k, s.head_dim_qk) + (s.v_in_k ? 0 : row_bytes(s, v, s.head_dim_v));
}

// The number of parts into which the keys are split. groups: threadgroups without splits. rows: of
// a threadgroup. keys: the most of a sequence, for which no part is empty.
//
// A wave takes the same time even if it is not full, so the candidates fill whole waves. The time
// of a wave is estimated from the bytes of a threadgroup: the keys in each pass, the queries, and
// the float32 results, which are written and read again.
int64_t choose_splits(const FlashDecodeSpecialisation& s, int64_t groups, int64_t rows,
                      int64_t keys, const Gpu& gpu) {
  const int64_t steps = (keys + s.step_keys() - 1) / s.step_keys();
  if (steps == 0 || groups == 0) { return 1; }
  const int64_t q_bytes = s.head_dim_qk * element_bytes(s.element);
  const int64_t row_cost = rows * (q_bytes + 2 * s.head_dim_v * int64_t(sizeof(float)));
  const int64_t key = s.passes(rows) * key_bytes(s);
  const int64_t most = std::clamp<int64_t>(keys * key / row_cost, 1, std::min(steps, kMaxSplits));
  const int64_t slots =
      gpu.cores * threadgroups_per_core(gpu, s.registers(), s.threads(), s.threadgroup_bytes());
  int64_t best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int64_t waves = 0; waves <= kMostWaves; ++waves) {  // 0: one split
    const int64_t splits = std::clamp<int64_t>(waves * slots / groups, 1, most);
    const auto needed = static_cast<double>((splits * groups + slots - 1) / slots);
    const double merge = splits > 1 ? double(kMergeKeys * key) : 0.0;
    const double time = needed * double(keys * key + splits * row_cost) / double(splits) + merge;
    if (time < best_time) {
      best_time = time;
      best = splits;
    }
  }
  const int64_t split_steps = (steps + best - 1) / best;
  return (steps + split_steps - 1) / split_steps;
}

// The products of a threadgroup's rows and a split's keys, and the reads of the keys in each pass.
double threadgroup_work(const FlashDecodeCall& call) {
  const FlashDecodeSpecialisation& s = call.specialisation;
  // An estimate, not a measurement.
  constexpr double kProductsPerByte = 20;
  const int64_t rows = divide_up(call.list_rows(), call.row_groups / call.list_count());
  const double bytes = double(s.passes(rows)) * key_bytes(s);
  const double products = double(rows) * pair_work(s.features, s.head_dim_qk + s.head_dim_v);
  return double(divide_up(call.keys, call.splits)) * (products + kProductsPerByte * bytes);
}

// The most row groups of a sequence: enough to fill any GPU, with a grid far below 2^32.
constexpr int64_t kMostGroups = 1 << 16;

Defines flash_decode_defines(const FlashDecodeCall& call, const FlashDecodeAppend* append) {
  const FlashDecodeSpecialisation& s = call.specialisation;
  Defines specific{
      {"KEY_FRAGMENTS", s.key_fragments},
      {"KEY_SIMDGROUPS", s.key_simdgroups()},
      {"COLUMN_SIMDGROUPS", s.column_simdgroups()},
  };
  define_if(call.splits > 1, specific, "SPLIT");
  define_if(s.row_simdgroups() > 1, specific, "ROW_SIMDGROUPS", s.row_simdgroups());
  define_if(s.v_in_k, specific, "V_IN_K");
  define_if(s.vector_rows > 0, specific, "VECTOR_ROWS", s.vector_rows);
  define_if(s.vector_rows > 0, specific, "KEY_LANES", s.key_lanes());
  Defines defines = all_defines(s, specific);
  define_if(call.row_groups / call.list_count() < s.passes(call.list_rows()), defines, "ROW_LOOP");
  define_if(call.lists.indices.has_value(), defines, "INDEX_BLOCK", call.lists.kv_block_size);
  if (append != nullptr) { defines.append(append->defines.begin(), append->defines.end()); }
  return defines;
}

Launch flash_decode_launch(const FlashDecodeCall& call, const FlashFwdArguments& a,
                           const FlashDecodeAppend* append, const Tensor& out, const Tensor& lse) {
  const bool split = call.splits > 1;
  FlashDecodeParams params{};
  params.problem = flash_problem(call.forward, a);
  params.out_strides = row_strides(out);
  params.lse_strides = split ? row_strides(lse) : statistics_strides(lse);
  if (a.packing) {  // partial results have one batch
    params.out_strides.batch = params.lse_strides.batch = 0;
  }
  params.out_split_stride = split ? out.stride(3) : 0;
  params.lse_sum_offset = split ? call.splits : 0;
  params.row_groups = static_cast<int32_t>(call.row_groups);
  params.list_groups = static_cast<int32_t>(call.row_groups / call.list_count());
  params.list_rows = static_cast<int32_t>(call.list_rows());
  Launch launch("flash_decode", flash_decode_defines(call, append));
  launch.buffers = flash_inputs(call.forward, a);
  append_block_lists(launch.buffers, a, FlexWalk::kOverKeys);
  if (call.lists.indices) {
    fill_list_params(call.lists, call.forward, params.problem.flex);
    launch.buffers.push_back({FLASH_INDICES, *call.lists.indices, false});
  }
  if (append != nullptr) {
    for (BufferArgument& buffer : launch.buffers) {
      buffer.writable = buffer.slot == FLASH_K || buffer.slot == FLASH_V ||
                        buffer.slot == FLASH_K_SCALE || buffer.slot == FLASH_V_SCALE;
    }
    launch.buffers.push_back({FLASH_DECODE_NEW_K, append->k, false});
    launch.buffers.push_back({FLASH_DECODE_NEW_V, append->v, false});
    read_if(append->cu_seqlens_k_new, launch.buffers, FLASH_DECODE_CU_SEQLENS_K_NEW);
    params.append = append->params;
    params.rotate_q_by_token = append->rotate_q_by_token;
    params.problem.new_keys = append->params.length;
  }
  fill_tree_params(call.options, params);
  read_if(call.options.parents, launch.buffers, FLASH_DECODE_PARENTS);
  read_if(call.options.tree_mask, launch.buffers, FLASH_DECODE_TREE_MASK);
  launch.buffers.push_back({FLASH_DECODE_OUT, out, true});
  launch.buffers.push_back({FLASH_DECODE_LSE, lse, true});
  launch.set_params(FLASH_PARAMS, params);
  launch.threadgroups = call.threadgroups;
  launch.threads = extent(call.specialisation.threads());
  launch.work.threadgroup = threadgroup_work(call);
  return launch;
}

// A tensor of results of each split, (batch, heads, queries, ...).
Tensor empty_partial(const FlashDecodeCall& call, const Tensor& like, const Dims& row) {
  const FlashFwdCall& f = call.forward;
  const bool packed = f.problem.features.packed_q;
  Dims sizes{packed ? 1 : f.batch, f.heads, packed ? f.q_total : f.q_length};
  for (const int64_t size : row) { sizes.push_back(size); }
  return new_empty(like, sizes, ScalarType::Float);
}

std::string describe_choice(const FlashDecodeCall& call) {
  const FlashDecodeSpecialisation& s = call.specialisation;
  const int hadamard = s.features.cache.hadamard;
  return Counted{call.splits, "split"}.str() + " of the keys; " + Counted{s.all_rows, "query"} +
         " of a KV head in " + Counted{s.passes(s.all_rows), "pass"} + " over its keys" +
         (call.row_groups > call.list_count() ? ", each by threadgroups of its own" : "") +
         (s.v_in_k ? ", which hold the values too" : "") +
         (hadamard > 0 ? ", rotated in blocks of " + std::to_string(hadamard) + " columns" : "") +
         ": " + row_text(s.defaults);
}

}  // namespace

FlashFwdCall check_flash_decode(const FlashDecodeArguments& a) {
  const FlashFwdArguments& f = a.forward;
  FlashFwdCall call = check_flash_fwd(f);
  check(0 <= a.num_splits && a.num_splits <= kMaxSplits, "`num_splits` is ", a.num_splits,
        "; it must be 0 (chosen for you) or in 1..", kMaxSplits);
  check(!call.problem.features.dropout, "`dropout_p` is ", f.options.dropout_p,
        "; flash_decode has no dropout: use flash_fwd");
  check(!f.options.k_rotary_cos,
        "`k_rotary_cos` is given; flash_decode has no rotation of `k`: rotate it as it enters the "
        "cache, or use flash_fwd");
  const int64_t heads = call.kv_heads > 0 ? call.heads / call.kv_heads : 0;
  const int64_t queries = std::max(call.q_length, call.q_total);
  check(queries * heads <= kMaxRows, "`q` has shape ", shape_text(f.q), ", ",
        Counted{queries, "query"}, " of ", Counted{heads, "head"},
        " a KV head; flash_decode takes up to ", kMaxRows, " of them together: use flash_fwd");
  check(f.packing || a.options.max_seqlen_q == 0, "`max_seqlen_q` is ", a.options.max_seqlen_q,
        " and `cu_seqlens_q` is not given; it is of packed queries only");
  const FlashFwdProblem& p = call.problem;
  call.problem.features.cache.hadamard = check_hadamard(
      a.options.hadamard, f.cache.names, p.features.cache.formats, p.head_dim_qk, p.head_dim_v);
  check_indices(a.lists, f, call);
  if (a.lists.indices && has_long_offsets(*a.lists.indices)) {
    call.problem.features.long_offsets = true;
  }
  check_tree(a, call);
  return call;
}

FlashDecodeCall choose_flash_decode(const FlashFwdCall& forward, const FlashDecodeArguments& a,
                                    bool appends) {
  const FlashFwdArguments& f = a.forward;
  FlashDecodeCall call{forward, a.lists, a.options, {}, 0, 1, 1, {}};
  if (!forward.launches()) { return call; }
  call.keys = keys_read(a, forward);
  const int64_t rows = call.list_rows();
  const KvFormats& formats = forward.problem.features.cache.formats;
  call.specialisation =
      tuned(choose_flash_decode(forward.problem, rows, v_in_k(f.cache, formats, f.k, f.v), gpu()),
            rows, call.keys);
  const FlashDecodeSpecialisation& s = call.specialisation;
  // New keys are visible only to the threadgroup that writes them, so the rows are not divided.
  const int64_t most = std::max<int64_t>(kMostGroups / (forward.kv_heads * call.list_count()), 1);
  const int64_t list_groups = appends ? 1 : std::min(s.passes(rows), most);
  call.row_groups = call.list_count() * list_groups;
  check(forward.kv_heads * call.row_groups <= kMaxLength, "`indices` has ",
        Counted{call.list_count(), "list"}, " a KV head; with ", Counted{forward.kv_heads, "head"},
        " it may have ", kMaxLength / (forward.kv_heads * list_groups));
  const int64_t groups = int64_t{forward.batch} * forward.kv_heads * call.row_groups;
  const int64_t group_rows = divide_up(rows, list_groups);
  call.splits =
      a.num_splits > 0 ? a.num_splits : choose_splits(s, groups, group_rows, call.keys, gpu());
  // Each split writes partial results, and two statistics of a row.
  if (double(forward.queries()) * forward.heads * std::max(s.head_dim_v, 2) * call.splits >
      kMaxLength) {
    call.specialisation.features.long_offsets = true;
  }
  call.threadgroups =
      extent(call.splits, forward.kv_heads * call.row_groups, forward.batch + (f.packing ? 1 : 0));
  return call;
}

std::tuple<Tensor, Tensor> run(const FlashDecodeCall& call, const FlashFwdArguments& a,
                               const FlashDecodeAppend* append, Backend& backend) {
  Tensor out = new_out(a, call.forward.problem.head_dim_v);
  Tensor lse = new_lse(a);
  if (!call.forward.launches()) { return {out, lse}; }
  note(backend, [&] {
    return tile_note(call.specialisation, call.list_rows(), call.keys)
        .add("splits", call.splits)
        .add("reason", describe_choice(call) + describe_indices(call.lists, call.forward) +
                           describe_tree(call.options));
  });
  const auto decode_into = [&](const Tensor& result, const Tensor& result_lse) {
    run_chosen(backend, flash_decode_launch(call, a, append, result, result_lse),
               call.specialisation, call.list_rows(), call.keys);
  };
  if (call.splits == 1) {
    decode_into(out, lse);
  } else {
    const Tensor partial_out =
        empty_partial(call, a.q, {call.splits, call.specialisation.head_dim_v});
    // The maxima of a row's splits, and then their sums.
    const Tensor statistics = empty_partial(call, a.q, {2 * call.splits});
    decode_into(partial_out, statistics);
    merge_splits(partial_out, statistics, a.options.learnable_sink, out, lse, backend);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> flash_decode(const FlashDecodeArguments& a, Backend& backend) {
  return with_tiles_that_run([&] {
    return run(choose_flash_decode(check_flash_decode(a), a, false), a.forward, nullptr, backend);
  });
}

}  // namespace metal_attn
