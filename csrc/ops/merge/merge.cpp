#include "csrc/ops/merge/merge.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "csrc/ops/attention/choose.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/common/overlap.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kChunkBytes = 16;
constexpr int64_t kStateThreads = 256;  // of a threadgroup, at least where rows are narrow

// What both kernels are specialised by.
struct Specialisation {
  Element element;  // of out
  bool wide_loads;
  std::optional<Element> sink;
  bool infinity_is_empty;
  bool in_place;
  bool some_rows;  // of a mask

  Defines defines() const {
    Defines defines{{"ELEMENT", element_name(element)}, {"WIDE_LOADS", wide_loads}};
    if (sink) {
      defines.push_back({"SINK", 1});
      defines.push_back({"SINK_ELEMENT", element_name(*sink)});
    }
    if (infinity_is_empty) {
      defines.push_back({"INFINITY_IS_EMPTY", 1});
    }
    if (in_place) {
      defines.push_back({"IN_PLACE", 1});
    }
    if (some_rows) {
      defines.push_back({"SOME_ROWS", 1});
    }
    return defines;
  }
};

// Rows of `columns` columns, counted through batch, head and row of a head.
MergeShape merge_shape(const char* name, const Tensor& tensor, int64_t batch, int64_t heads,
                       int64_t length, int columns) {
  int64_t rows = 0;
  const bool countable = !__builtin_mul_overflow(batch, heads, &rows) &&
                         !__builtin_mul_overflow(rows, length, &rows) && rows <= kMaxLength;
  check(countable || batch == 0 || heads == 0 || length == 0, name, " has shape ",
        shape_text(tensor), ", in which more than ", kMaxLength,
        " rows lie; there may be at most that many");
  return {countable ? static_cast<uint32_t>(rows) : 0u, static_cast<uint32_t>(heads),
          static_cast<uint32_t>(length), columns};
}

struct Grid {
  std::array<uint32_t, 3> threadgroups;
  std::array<uint32_t, 3> threads;
};

Launch launch_of(const char* kernel, const Specialisation& s, const Grid& grid) {
  Launch launch;
  launch.program.family = "merge";
  launch.kernel = kernel;
  launch.program.defines = s.defines();
  launch.threadgroups = grid.threadgroups;
  launch.threads = grid.threads;
  return launch;
}

std::string explanation(const char* kernel, const Specialisation& s, const Grid& grid,
                        const Tensor& first, const char* unit) {
  const std::string loads =
      s.wide_loads ? "16-byte loads" : "element-wise loads, as some row is not 16-byte aligned";
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", s.defines())
      .add("grid", grid.threadgroups)
      .add("threads", grid.threads)
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", first.is_cpu() ? "simulator" : "mps")
      .add("reason", grid.threadgroups[1] > 0 ? loads + ", " + unit
                                              : "there are no rows, so no kernel is launched")
      .text();
}

struct StateCall {
  Specialisation specialisation;
  MergeShape shape;

  Grid grid() const {
    const int64_t chunk_columns =
        specialisation.wide_loads ? kChunkBytes / element_bytes(specialisation.element) : 1;
    const int64_t across = shape.columns / chunk_columns;
    const int64_t down = std::max<int64_t>(kStateThreads / across, 1);
    return {{1, static_cast<uint32_t>(divide_up(shape.rows, down)), shape.rows > 0 ? 1u : 0u},
            {static_cast<uint32_t>(across), static_cast<uint32_t>(down), 1}};
  }
};

void check_state(const char* name, const Tensor& out, const char* lse_name, const Tensor& lse) {
  check_last_stride(name, out);
  check_storage(name, out);
  const bool packed = out.dim() == 3;
  check_statistics(
      lse_name, lse, name, out,
      packed ? Dims{out.size(1), out.size(0)} : Dims{out.size(0), out.size(1), out.size(2)});
}

StateCall analyse(const MergeStateArguments& a) {
  StateCall call{};
  const Tensor& out = a.out_a;
  check_device("out_a", out);
  call.specialisation.element = check_element("out_a", out);
  const int64_t rank = out.dim();
  check(rank == 3 || rank == 4, "out_a has ", rank, " dimensions, shape ", shape_text(out),
        "; it must have 4, (batch, heads, length, head_dim), or 3, (tokens, heads, head_dim)");
  const bool packed = rank == 3;
  const int columns = check_head_dim("out_a", out.size(rank - 1), kMaxHeadDimV);
  call.shape = packed ? merge_shape("out_a", out, 1, out.size(1), out.size(0), columns)
                      : merge_shape("out_a", out, out.size(0), out.size(1), out.size(2), columns);
  check_state("out_a", out, "lse_a", a.lse_a);
  check_device("out_b", a.out_b);
  check_same_device("out_b", a.out_b, "out_a", out);
  check_same_dtype("out_b", a.out_b, "out_a", out);
  check_shape("out_b", a.out_b, {out.sizes()});
  check_state("out_b", a.out_b, "lse_b", a.lse_b);
  call.specialisation.infinity_is_empty = a.infinity_is_empty;
  // The result's rows are dense, so aligned if whole chunks make one.
  call.specialisation.wide_loads = rows_aligned_16(out) && rows_aligned_16(a.out_b) &&
                                   columns * out.element_size() % kChunkBytes == 0;
  return call;
}

void check_mask(const Tensor& mask, const Tensor& out) {
  check_same_device("mask", mask, "out_a", out);
  check_known_dtype("mask", mask, "bool");
  check(mask.scalar_type() == ScalarType::Bool, "mask has dtype ", dtype_text(mask),
        "; it must be bool");
  check_shape("mask", mask, {out.dim() == 3 ? Dims{out.size(0)} : Dims{out.size(0), out.size(2)}});
  check_storage("mask", mask);
}

RowStrides mask_strides(const Tensor& mask) {
  return mask.dim() == 1 ? RowStrides{0, 0, mask.stride(0)}
                         : RowStrides{mask.stride(0), 0, mask.stride(1)};
}

// What the result is written into.
void check_written(const MergeStateArguments& a, const std::optional<Tensor>& mask) {
  std::vector<std::pair<const char*, const Tensor*>> tensors{
      {"out_a", &a.out_a}, {"lse_a", &a.lse_a}, {"out_b", &a.out_b}, {"lse_b", &a.lse_b}};
  if (mask) {
    tensors.push_back({"mask", &*mask});
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& [name, written] = tensors[i];
    check(!may_overlap_itself(*written), name, " has shape ", shape_text(*written), " and strides ",
          stride_text(*written), ": elements may share memory, so it cannot be written in place");
    for (std::size_t j = i + 1; j < tensors.size(); ++j) {
      const auto& [other_name, other] = tensors[j];
      const bool alike = other->element_size() == written->element_size();
      check(alike ? !may_overlap(*other, *written) : !spans_overlap(*other, *written), other_name,
            " may share elements with ", name, ", which is written in place; call ", other_name,
            ".clone() first");
    }
  }
}

StateCall analyse(const MergeStateArguments& a, bool inplace, const std::optional<Tensor>& mask) {
  StateCall call = analyse(a);
  check(inplace || !mask, "mask is given; only merge_state_ has one");
  if (mask) {
    check_mask(*mask, a.out_a);
  }
  if (inplace) {
    check_written(a, mask);
  }
  call.specialisation.in_place = inplace;
  call.specialisation.some_rows = mask.has_value();
  return call;
}

// `out` and `lse`: in place those of a.
void run_state(const StateCall& call, const MergeStateArguments& a,
               const std::optional<Tensor>& mask, const Tensor& out, const Tensor& lse,
               Backend& backend) {
  if (call.shape.rows == 0) {
    return;
  }
  MergeStateParams params{};
  params.out_a_strides = row_strides(a.out_a);
  params.lse_a_strides = statistics_strides(a.lse_a);
  params.out_b_strides = row_strides(a.out_b);
  params.lse_b_strides = statistics_strides(a.lse_b);
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  if (mask) {
    params.mask_strides = mask_strides(*mask);
  }
  params.shape = call.shape;

  Launch launch = launch_of("merge_state", call.specialisation, call.grid());
  if (!call.specialisation.in_place) {
    launch.buffers.push_back({MERGE_STATE_OUT_A, a.out_a, false});
    launch.buffers.push_back({MERGE_STATE_LSE_A, a.lse_a, false});
  }
  launch.buffers.push_back({MERGE_STATE_OUT_B, a.out_b, false});
  launch.buffers.push_back({MERGE_STATE_LSE_B, a.lse_b, false});
  launch.buffers.push_back({MERGE_STATE_OUT, out, true});
  launch.buffers.push_back({MERGE_STATE_LSE, lse, true});
  if (mask) {
    launch.buffers.push_back({MERGE_STATE_MASK, *mask, false});
  }
  launch.params_slot = MERGE_STATE_PARAMS;
  launch.params.set(params);
  backend.run(launch);
}

struct SplitsCall {
  Specialisation specialisation;
  ScalarType out_dtype;
  MergeShape shape;

  Grid grid() const {
    const int64_t lane_columns = specialisation.wide_loads ? kChunkBytes / sizeof(float) : 1;
    const int64_t slices = divide_up(shape.columns, lane_columns * MERGE_SPLITS_COLUMN_LANES);
    const int64_t down = divide_up(shape.rows, MERGE_SPLITS_SIMDGROUPS);
    return {{static_cast<uint32_t>(slices), static_cast<uint32_t>(down), down > 0 ? 1u : 0u},
            {MERGE_SPLITS_SIMDGROUPS * 32, 1, 1}};
  }
};

// Whether four columns of a split, and those of out that come of them, are one vector.
bool splits_are_wide(const Tensor& partial_out, bool out_aligned) {
  return out_aligned && rows_aligned_16(partial_out) && partial_out.size(4) % 4 == 0;
}

void check_partial(const char* name, const Tensor& tensor) {
  check(tensor.is_contiguous(), name, " has strides ", stride_text(tensor),
        "; it must be contiguous: call ", name, ".contiguous() first");
}

SplitsCall analyse(const MergeSplitsArguments& a) {
  SplitsCall call{};
  const Tensor& partial_out = a.partial_out;
  check_device("partial_out", partial_out);
  check_rank("partial_out", partial_out, 5, "(batch, heads, length, splits, head_dim)");
  const auto sizes = partial_out.sizes();
  check_statistics("partial_out", partial_out, "partial_out", partial_out, sizes);
  check_partial("partial_out", partial_out);
  const int columns = check_head_dim("partial_out", sizes[4], kMaxHeadDimV);
  check(sizes[3] >= 1 && sizes[3] <= kMaxSplits, "partial_out has ", sizes[3],
        " splits; there must be 1 to ", kMaxSplits);
  call.shape = merge_shape("partial_out", partial_out, sizes[0], sizes[1], sizes[2], columns);
  check_statistics("partial_lse", a.partial_lse, "partial_out", partial_out,
                   {sizes.data(), sizes.size() - 1});
  check_partial("partial_lse", a.partial_lse);

  Specialisation& s = call.specialisation;
  call.out_dtype = a.out_dtype.value_or(ScalarType::Float);
  s.element = check_element("out_dtype", call.out_dtype);
  if (a.learnable_sink) {
    s.sink = check_sink(*a.learnable_sink, sizes[1], "partial_out", partial_out);
  }
  s.infinity_is_empty = a.infinity_is_empty;
  s.wide_loads =
      splits_are_wide(partial_out, columns * element_bytes(s.element) % kChunkBytes == 0);
  return call;
}

void run_splits(const SplitsCall& call, const Tensor& partial_out, const Tensor& partial_lse,
                const std::optional<Tensor>& sink, const Tensor& out, const Tensor& lse,
                Backend& backend) {
  if (call.shape.rows == 0) {
    return;
  }
  MergeSplitsParams params{};
  params.out_strides = row_strides(out);
  params.lse_strides = statistics_strides(lse);
  params.shape = call.shape;
  params.splits = static_cast<int32_t>(partial_out.size(3));

  Launch launch = launch_of("merge_splits", call.specialisation, call.grid());
  launch.buffers = {{MERGE_SPLITS_PARTIAL_OUT, partial_out, false},
                    {MERGE_SPLITS_PARTIAL_LSE, partial_lse, false},
                    {MERGE_SPLITS_OUT, out, true},
                    {MERGE_SPLITS_LSE, lse, true}};
  if (sink) {
    launch.buffers.push_back({MERGE_SPLITS_SINK, *sink, false});
  }
  launch.params_slot = MERGE_SPLITS_PARAMS;
  launch.params.set(params);
  backend.run(launch);
}

}  // namespace

std::tuple<Tensor, Tensor> merge_state(const MergeStateArguments& a, Backend& backend) {
  const StateCall call = analyse(a);
  Tensor out = new_empty_like(a.out_a);
  Tensor lse = new_empty(a.lse_a, sizes_of(a.lse_a), ScalarType::Float);
  run_state(call, a, std::nullopt, out, lse, backend);
  return {out, lse};
}

void merge_state_inplace(const MergeStateArguments& a, const std::optional<Tensor>& mask,
                         Backend& backend) {
  run_state(analyse(a, true, mask), a, mask, a.out_a, a.lse_a, backend);
}

std::tuple<Tensor, Tensor> merge_splits(const MergeSplitsArguments& a, Backend& backend) {
  const SplitsCall call = analyse(a);
  const auto partial_sizes = a.partial_out.sizes();
  Dims sizes(partial_sizes.begin(), partial_sizes.begin() + 3);
  Tensor lse = new_empty(a.partial_lse, sizes, ScalarType::Float);
  sizes.push_back(partial_sizes[4]);
  Tensor out = new_empty(a.partial_out, sizes, call.out_dtype);
  run_splits(call, a.partial_out, a.partial_lse, a.learnable_sink, out, lse, backend);
  return {out, lse};
}

void merge_splits(const Tensor& partial_out, const Tensor& partial_lse,
                  const std::optional<Tensor>& sink, Tensor& out, Tensor& lse, Backend& backend) {
  SplitsCall call = analyse({partial_out, partial_lse, out.scalar_type(), sink, false});
  call.specialisation.wide_loads = splits_are_wide(partial_out, rows_aligned_16(out));
  run_splits(call, partial_out, partial_lse, sink, out, lse, backend);
}

std::string merge_state_explain(const MergeStateArguments& a, bool inplace,
                                const std::optional<Tensor>& mask) {
  const StateCall call = analyse(a, inplace, mask);
  return explanation("merge_state", call.specialisation, call.grid(), a.out_a, "one a thread");
}

std::string merge_splits_explain(const MergeSplitsArguments& a) {
  const SplitsCall call = analyse(a);
  return explanation("merge_splits", call.specialisation, call.grid(), a.partial_out,
                     "32 splits at a time");
}

}  // namespace metal_attn
