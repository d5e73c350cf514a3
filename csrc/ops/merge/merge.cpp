#include "csrc/ops/merge/merge.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/problem/strides.h"

namespace metal_attn {
namespace {

struct MergeSpecialisation {
  bool wide_loads;
  Grid grid;
};

// Checks that the number of rows of all batches and heads is at most kMaxLength.
MergeShape merge_shape(ArgumentName name, const Tensor& tensor, int64_t batch, int64_t heads,
                       int64_t length, int columns) {
  int64_t rows = 0;
  const bool countable = !__builtin_mul_overflow(batch, heads, &rows) &&
                         !__builtin_mul_overflow(rows, length, &rows) && rows <= kMaxLength;
  check(countable || batch == 0 || heads == 0 || length == 0, name, " has shape ",
        shape_text(tensor), "; it may have at most ", kMaxLength, " rows");
  return {countable ? static_cast<uint32_t>(rows) : 0u, static_cast<uint32_t>(heads),
          static_cast<uint32_t>(length), columns};
}

void check_state(ArgumentName name, const Tensor& out, ArgumentName lse_name, const Tensor& lse) {
  check_rows(name, out);
  check_statistics(lse_name, lse, name, out, lse_sizes(out));
}

MergeProblem check_operands(const MergeStateArguments& a) {
  MergeProblem p{};
  const Tensor& out = a.out_a;
  check_device("out_a", out);
  p.element = check_element("out_a", out);
  const int64_t rank = out.dim();
  check(rank == 3 || rank == 4, "`out_a` has ", Counted{rank, "dimension"}, ", shape ",
        shape_text(out),
        "; it must have 4, (batch, heads, length, head_dim), or 3, (tokens, heads, head_dim)");
  const bool packed = rank == 3;
  const int columns = check_head_dim("out_a", out.size(rank - 1), kMaxHeadDimV);
  p.shape = packed ? merge_shape("out_a", out, 1, out.size(1), out.size(0), columns)
                   : merge_shape("out_a", out, out.size(0), out.size(1), out.size(2), columns);
  check_state("out_a", out, "lse_a", a.lse_a);
  check_same_device("out_b", a.out_b, "out_a", out);
  check_same_dtype("out_b", a.out_b, "out_a", out);
  check_shape("out_b", a.out_b, {out.sizes()});
  check_state("out_b", a.out_b, "lse_b", a.lse_b);
  p.infinity_is_empty = a.infinity_is_empty;
  return p;
}

void check_mask(const Tensor& mask, const Tensor& out) {
  check_same_device("mask", mask, "out_a", out);
  check_dtype("mask", mask, {ScalarType::Bool});
  check_shape("mask", mask, {out.dim() == 3 ? Dims{out.size(0)} : Dims{out.size(0), out.size(2)}});
  check_storage("mask", mask);
}

MergeProblem check_merge_state(const MergeStateArguments& a, bool inplace) {
  MergeProblem p = check_operands(a);
  if (a.mask) { check_mask(*a.mask, a.out_a); }
  if (inplace) {
    std::vector<Named> read = present({{"mask", &a.mask}});
    read.insert(read.begin(), {{"out_b", &a.out_b}, {"lse_b", &a.lse_b}});
    check_written({{"out_a", &a.out_a}, {"lse_a", &a.lse_a}}, read, {});
  }
  p.in_place = inplace;
  p.some_rows = a.mask.has_value();
  return p;
}

MergeProblem check_merge_splits(const MergeSplitsArguments& a) {
  MergeProblem p{};
  const Tensor& partial_out = a.partial_out;
  check_device("partial_out", partial_out);
  check_rank("partial_out", partial_out, 5, "(batch, heads, length, splits, head_dim)");
  const auto sizes = partial_out.sizes();
  check_statistics("partial_out", partial_out, "partial_out", partial_out, sizes);
  check_contiguous("partial_out", partial_out);
  const int columns = check_head_dim("partial_out", sizes[4], kMaxHeadDimV);
  check(sizes[3] >= 1 && sizes[3] <= kMaxSplits, "`partial_out` has ", sizes[3],
        " splits; there must be 1 to ", kMaxSplits);
  p.shape = merge_shape("partial_out", partial_out, sizes[0], sizes[1], sizes[2], columns);
  check_statistics("partial_lse", a.partial_lse, "partial_out", partial_out,
                   {sizes.data(), sizes.size() - 1});
  check_contiguous("partial_lse", a.partial_lse);

  p.element = check_element("out_dtype", a.out_dtype.value_or(ScalarType::Float));
  if (a.learnable_sink) {
    p.sink = check_sink(*a.learnable_sink, sizes[1], "partial_out", partial_out);
  }
  p.infinity_is_empty = a.infinity_is_empty;
  return p;
}

constexpr int kChunkBytes = 16;
constexpr int64_t kStateThreads = 256;  // of a threadgroup, unless rows are wider

bool dense_rows_aligned_16(const MergeProblem& p) {
  return p.shape.columns * element_bytes(p.element) % kChunkBytes == 0;
}

MergeSpecialisation choose_merge_state(const MergeStateArguments& a, const MergeProblem& p) {
  const bool wide_loads =
      rows_aligned_16(a.out_a) && rows_aligned_16(a.out_b) && dense_rows_aligned_16(p);
  const int64_t across =
      p.shape.columns / (wide_loads ? kChunkBytes / element_bytes(p.element) : 1);
  const int64_t down = std::max<int64_t>(kStateThreads / across, 1);
  return {wide_loads,
          {extent(1, divide_up(p.shape.rows, down), p.shape.rows > 0), extent(across, down)}};
}

// out_aligned: rows of out are 16-byte aligned.
MergeSpecialisation choose_merge_splits(const Tensor& partial_out, const MergeProblem& p,
                                        bool out_aligned) {
  // A vector has four columns of a split or of out.
  const bool wide_loads =
      out_aligned && rows_aligned_16(partial_out) && partial_out.size(4) % 4 == 0;
  const int64_t lane_columns = wide_loads ? kChunkBytes / sizeof(float) : 1;
  const int64_t slices = divide_up(p.shape.columns, lane_columns * MERGE_SPLITS_COLUMN_LANES);
  const int64_t down = divide_up(p.shape.rows, MERGE_SPLITS_SIMDGROUPS);
  return {wide_loads,
          {extent(slices, down, down > 0), extent(MERGE_SPLITS_SIMDGROUPS * kSimdgroupThreads)}};
}

Defines merge_defines(const MergeProblem& p, const MergeSpecialisation& s) {
  Defines defines{{"ELEMENT", element_name(p.element)}, {"WIDE_LOADS", s.wide_loads}};
  if (p.sink) {
    defines.push_back({"SINK", 1});
    defines.push_back({"SINK_ELEMENT", element_name(*p.sink)});
  }
  define_if(p.infinity_is_empty, defines, "INFINITY_IS_EMPTY");
  define_if(p.in_place, defines, "IN_PLACE");
  define_if(p.some_rows, defines, "SOME_ROWS");
  define_if(p.sums, defines, "SUMS");
  return defines;
}

RowStrides mask_strides(const Tensor& mask) {
  return mask.dim() == 1 ? RowStrides{0, 0, mask.stride(0)}
                         : RowStrides{mask.stride(0), 0, mask.stride(1)};
}

Launch launch_of(const char* kernel, const MergeProblem& p, const MergeSpecialisation& s) {
  Launch launch("merge", kernel, merge_defines(p, s));
  launch.threadgroups = s.grid.threadgroups;
  launch.threads = s.grid.threads;
  return launch;
}

void run(const Launch& launch, const MergeSpecialisation& s, const char* unit, Backend& backend) {
  note(backend, [&] {
    const std::string loads =
        s.wide_loads ? "16-byte loads" : "element-wise loads, as some row is not 16-byte aligned";
    return JsonObject().add("reason", loads + ", " + unit);
  });
  backend.run(launch);
}

// out and lse: the results. If the op works in place, they are out_a and lse_a.
void run_state(const MergeStateArguments& a, const MergeProblem& p, const Tensor& out,
               const Tensor& lse, Backend& backend) {
  if (p.shape.rows == 0) { return; }
  MergeStateParams params{};
  params.out_a_strides = row_strides(a.out_a);
  params.lse_a_strides = statistics_strides(a.lse_a);
  params.out_b_strides = row_strides(a.out_b);
  params.lse_b_strides = statistics_strides(a.lse_b);
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  if (a.mask) { params.mask_strides = mask_strides(*a.mask); }
  params.shape = p.shape;

  const MergeSpecialisation s = choose_merge_state(a, p);
  Launch launch = launch_of("merge_state", p, s);
  if (!p.in_place) {
    launch.buffers.push_back({MERGE_STATE_OUT_A, a.out_a, false});
    launch.buffers.push_back({MERGE_STATE_LSE_A, a.lse_a, false});
  }
  launch.buffers.push_back({MERGE_STATE_OUT_B, a.out_b, false});
  launch.buffers.push_back({MERGE_STATE_LSE_B, a.lse_b, false});
  launch.buffers.push_back({MERGE_STATE_OUT, out, true});
  launch.buffers.push_back({MERGE_STATE_LSE, lse, true});
  read_if(a.mask, launch.buffers, MERGE_STATE_MASK);
  launch.set_params(MERGE_STATE_PARAMS, params);
  run(launch, s, "one per thread", backend);
}

void run_splits(const Tensor& partial_out, const Tensor& partial_lse, const OptionalTensor& sink,
                const MergeProblem& p, bool out_aligned, const Tensor& out, const Tensor& lse,
                Backend& backend) {
  if (p.shape.rows == 0) { return; }
  MergeSplitsParams params{};
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  params.shape = p.shape;
  params.splits = static_cast<int32_t>(partial_out.size(3));

  const MergeSpecialisation s = choose_merge_splits(partial_out, p, out_aligned);
  Launch launch = launch_of("merge_splits", p, s);
  launch.buffers = {{MERGE_SPLITS_PARTIAL_OUT, partial_out, false},
                    {MERGE_SPLITS_PARTIAL_LSE, partial_lse, false},
                    {MERGE_SPLITS_OUT, out, true},
                    {MERGE_SPLITS_LSE, lse, true}};
  read_if(sink, launch.buffers, MERGE_SPLITS_SINK);
  launch.set_params(MERGE_SPLITS_PARAMS, params);
  run(launch, s, "32 splits at a time", backend);
}

}  // namespace

std::tuple<Tensor, Tensor> merge_state(const MergeStateArguments& a, Backend& backend) {
  const MergeProblem p = check_merge_state(a, false);
  Tensor out = new_empty_like(a.out_a);
  Tensor lse = new_empty(a.lse_a, sizes_of(a.lse_a), ScalarType::Float);
  run_state(a, p, out, lse, backend);
  return {out, lse};
}

void merge_state_inplace(const MergeStateArguments& a, Backend& backend) {
  run_state(a, check_merge_state(a, true), a.out_a, a.lse_a, backend);
}

std::tuple<Tensor, Tensor> merge_splits(const MergeSplitsArguments& a, Backend& backend) {
  const MergeProblem p = check_merge_splits(a);
  const auto partial_sizes = a.partial_out.sizes();
  Dims sizes(partial_sizes.begin(), partial_sizes.begin() + 3);
  Tensor lse = new_empty(a.partial_lse, sizes, ScalarType::Float);
  sizes.push_back(partial_sizes[4]);
  Tensor out = new_empty(a.partial_out, sizes, a.out_dtype.value_or(ScalarType::Float));
  run_splits(a.partial_out, a.partial_lse, a.learnable_sink, p, dense_rows_aligned_16(p), out, lse,
             backend);
  return {out, lse};
}

void merge_splits(const Tensor& partial_out, const Tensor& statistics, const OptionalTensor& sink,
                  Tensor& out, Tensor& lse, Backend& backend) {
  MergeProblem p{};
  const auto sizes = partial_out.sizes();
  p.shape = merge_shape("partial_out", partial_out, sizes[0], sizes[1], sizes[2],
                        static_cast<int>(sizes[4]));
  p.element = check_element("out", out);
  p.sums = true;
  if (sink) { p.sink = check_element("learnable_sink", *sink); }
  run_splits(partial_out, statistics, sink, p, rows_aligned_16(out), out, lse, backend);
}

}  // namespace metal_attn
