#include "csrc/ops/softmax/softmax.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "csrc/ops/attention/choose.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/runtime/torch_call.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

constexpr int kSimdgroupThreads = 32;

// Rows of up to this many values are one SIMD group's: a barrier would cost more than it saves.
constexpr int64_t kShortRow = 1024;
// Those share threadgroups of this size, and somewhat longer rows have one each.
constexpr int kSimdgroups = 8;
// From here on a row has Metal's largest threadgroup, 1024 threads, each with 16 values or more.
constexpr int64_t kLongRow = 16384;
constexpr int kMaxSimdgroups = 32;

// Metal counts threads along each dimension of the grid in 32 bits, and at most 1024 are a group.
constexpr int64_t kMaxGroupsAcross = 4096;

struct Specialisation {
  Element element;
  int row_simdgroups;
  int threadgroup_rows;
  bool wide_loads;

  uint32_t threads() const {
    return static_cast<uint32_t>(kSimdgroupThreads * row_simdgroups * threadgroup_rows);
  }
  int threadgroup_bytes() const {
    return row_simdgroups > 1 ? 2 * row_simdgroups * static_cast<int>(sizeof(float)) : 0;
  }
  Defines defines() const {
    return {{"ELEMENT", element_name(element)},
            {"ROW_SIMDGROUPS", row_simdgroups},
            {"THREADGROUP_ROWS", threadgroup_rows},
            {"WIDE_LOADS", wide_loads}};
  }
};

// A tensor as rows along its last dimension. wide_loads: they begin at 16 bytes, without gaps.
struct Rows {
  Element element;
  int64_t count;
  int64_t length;
  bool wide_loads;
};

Specialisation choose(const Rows& rows) {
  if (rows.length <= kShortRow) {
    return {rows.element, 1, kSimdgroups, rows.wide_loads};
  }
  return {rows.element, rows.length < kLongRow ? kSimdgroups : kMaxSimdgroups, 1, rows.wide_loads};
}

bool wide_rows(const Tensor& tensor) {
  return tensor.stride(tensor.dim() - 1) == 1 && rows_aligned_16(tensor);
}

Element check_operand(const char* name, const Tensor& tensor) {
  check_device(name, tensor);
  return check_element(name, tensor);
}

// `tensor` has its rows along the last dimension already; messages are about `given`.
Rows check_rows(const char* name, const Tensor& tensor, const Tensor& given, Element element) {
  Rows rows{element, 1, tensor.size(tensor.dim() - 1), false};
  bool empty = rows.length == 0;
  bool countable = true;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    empty = empty || tensor.size(dim) == 0;
    countable = countable && !__builtin_mul_overflow(rows.count, tensor.size(dim), &rows.count);
  }
  check(empty || (countable && rows.count <= kMaxLength), name, " has shape ", shape_text(given),
        ", in which more than ", kMaxLength, " rows of ", rows.length,
        " values lie; there may be at most that many");
  check_storage(name, given);
  rows.count = empty ? 0 : rows.count;
  rows.wide_loads = wide_rows(tensor);
  return rows;
}

void check_no_overlap(const char* name, const Tensor& tensor) {
  check(!may_overlap_itself(tensor), name, " has shape ", shape_text(tensor), " and strides ",
        stride_text(tensor), "; written in place, no two elements may share memory: call ", name,
        ".clone() first");
}

// x with the axis as its last dimension; a number is a row of one.
Tensor axis_last(const Tensor& x, int64_t dim) {
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  check(dim >= -rank && dim < rank, "dim is ", dim, "; x has ", x.dim(),
        " dimensions, so it must be in ", -rank, "..", rank - 1);
  return x.dim() == 0 ? torch::stable::unsqueeze(x, 0) : torch::stable::transpose(x, dim, -1);
}

struct SoftmaxCall {
  Tensor x;  // the axis last
  Rows rows;
};

SoftmaxCall analyse_softmax(const Tensor& x, int64_t dim, bool in_place) {
  const Element element = check_operand("x", x);
  const Tensor last = axis_last(x, dim);
  check_length("x", last, last.dim() - 1, "length along dim");
  const Rows rows = check_rows("x", last, x, element);
  if (in_place) {
    check_no_overlap("x", x);
  }
  return {last, rows};
}

Rows analyse_causal_mask(const Tensor& scores, int64_t q_offset) {
  const Element element = check_operand("scores", scores);
  check(scores.dim() >= 2, "scores has ", scores.dim(), " dimensions, shape ", shape_text(scores),
        "; it must have 2 or more: (..., q_length, kv_length)");
  check(q_offset >= -kMaxLength && q_offset <= kMaxLength, "q_offset is ", q_offset,
        "; it must be in ", -kMaxLength, "..", kMaxLength);
  check_length("scores", scores, scores.dim() - 2, "q_length");
  check_length("scores", scores, scores.dim() - 1, "kv_length");
  const Rows rows = check_rows("scores", scores, scores, element);
  check_no_overlap("scores", scores);
  return rows;
}

// Whether any score is masked: the first query sees the fewest keys.
bool masks(const Rows& rows, const Tensor& scores, int64_t q_offset) {
  return rows.count > 0 && q_offset + 1 < scores.size(scores.dim() - 1);
}

// The dimensions of `tensor` but its last. Neighbours are joined where one stride serves both, but
// the innermost one not if the kernel asks for its positions.
RowDims row_dims(const Tensor& tensor, bool keep_innermost) {
  RowDims dims{};
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) {
      continue;
    }
    const int inner = dims.count - 1;
    const bool may_join = inner > 0 || (inner == 0 && !keep_innermost);
    if (may_join && stride == dims.strides[inner] * dims.sizes[inner]) {
      dims.sizes[inner] *= static_cast<uint32_t>(size);
    } else {
      dims.sizes[dims.count] = static_cast<uint32_t>(size);
      dims.strides[dims.count] = stride;
      ++dims.count;
    }
  }
  return dims;
}

std::array<uint32_t, 3> threadgroups(const Rows& rows, const Specialisation& s) {
  const int64_t groups = (rows.count + s.threadgroup_rows - 1) / s.threadgroup_rows;
  const int64_t across = std::min(groups, kMaxGroupsAcross);
  const int64_t down = across == 0 ? 0 : (groups + across - 1) / across;
  return {static_cast<uint32_t>(across), static_cast<uint32_t>(down), down == 0 ? 0u : 1u};
}

Launch launch_of(const char* kernel, const Rows& rows) {
  const Specialisation s = choose(rows);
  Launch launch;
  launch.program.family = "softmax";
  launch.kernel = kernel;
  launch.program.defines = s.defines();
  launch.threadgroups = threadgroups(rows, s);
  launch.threads = {s.threads(), 1, 1};
  return launch;
}

void run_softmax(const SoftmaxCall& call, const Tensor& out, Backend& backend) {
  if (call.rows.count == 0) {
    return;
  }
  SoftmaxParams params{};
  params.x_rows = row_dims(call.x, false);
  params.out_rows = row_dims(out, false);
  params.x_stride = call.x.stride(call.x.dim() - 1);
  params.out_stride = out.stride(out.dim() - 1);
  params.rows = static_cast<uint32_t>(call.rows.count);
  params.length = static_cast<uint32_t>(call.rows.length);

  Rows rows = call.rows;
  rows.wide_loads = rows.wide_loads && wide_rows(out);
  Launch launch = launch_of("softmax", rows);
  launch.buffers = {{SOFTMAX_X, call.x, false}, {SOFTMAX_OUT, out, true}};
  launch.params_slot = SOFTMAX_PARAMS;
  launch.params.set(params);
  backend.run(launch);
}

// The result's layout without its memory.
Tensor empty_meta_like(const Tensor& x) {
  using torch::stable::detail::from;
  const torch::stable::Device meta(torch::headeronly::DeviceType::Meta);
  std::array<StableIValue, 6> stack{from(x),
                                    from(std::nullopt),
                                    from(std::nullopt),
                                    from(std::optional<torch::stable::Device>(meta)),
                                    from(std::nullopt),
                                    from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

std::string explanation(const char* kernel, const Tensor& tensor, const Rows& rows, bool launches,
                        const char* nothing) {
  const Specialisation s = choose(rows);
  const std::string reason =
      s.row_simdgroups == 1
          ? "rows of " + std::to_string(rows.length) + " are short: a SIMD group each"
          : "rows of " + std::to_string(rows.length) + " are long: a threadgroup each";
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", s.defines())
      .add("grid", launches ? threadgroups(rows, s) : std::array<uint32_t, 3>{})
      .add("threads", std::array<uint32_t, 3>{s.threads(), 1, 1})
      .add("threadgroup_bytes", s.threadgroup_bytes())
      .add("backend", tensor.is_cpu() ? "simulator" : "mps")
      .add("reason", launches ? reason : nothing)
      .text();
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = analyse_softmax(x, dim, false);
  const Tensor out = torch::stable::empty_like(x);
  run_softmax(call, axis_last(out, dim), backend);
  return out;
}

void softmax_inplace(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = analyse_softmax(x, dim, true);
  run_softmax(call, call.x, backend);
}

void apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset, Backend& backend) {
  const Rows rows = analyse_causal_mask(scores, q_offset);
  if (!masks(rows, scores, q_offset)) {
    return;
  }
  CausalMaskParams params{};
  params.score_rows = row_dims(scores, scores.size(scores.dim() - 2) > 1);
  params.key_stride = scores.stride(scores.dim() - 1);
  params.q_offset = q_offset;
  params.rows = static_cast<uint32_t>(rows.count);
  params.q_length = static_cast<uint32_t>(scores.size(scores.dim() - 2));
  params.kv_length = static_cast<uint32_t>(rows.length);

  Launch launch = launch_of("apply_causal_mask", rows);
  launch.buffers = {{CAUSAL_MASK_SCORES, scores, true}};
  launch.params_slot = CAUSAL_MASK_PARAMS;
  launch.params.set(params);
  backend.run(launch);
}

std::string softmax_explain(const Tensor& x, int64_t dim, bool in_place) {
  Rows rows = analyse_softmax(x, dim, in_place).rows;
  rows.wide_loads = rows.wide_loads && (in_place || wide_rows(axis_last(empty_meta_like(x), dim)));
  return explanation("softmax", x, rows, rows.count > 0,
                     "nothing to compute: x is empty, so no kernel is launched");
}

std::string apply_causal_mask_explain(const Tensor& scores, int64_t q_offset) {
  const Rows rows = analyse_causal_mask(scores, q_offset);
  return explanation("apply_causal_mask", scores, rows, masks(rows, scores, q_offset),
                     "no score is masked, so no kernel is launched");
}

}  // namespace metal_attn
