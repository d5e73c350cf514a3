#include "csrc/ops/softmax/softmax.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include "csrc/ops/common/overlap.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/runtime/torch_call.h"
#include "shaders/params/softmax.h"

namespace metal_attn {
namespace {

// The rows of a tensor along its last dimension.
struct SoftmaxRows {
  Element element;
  int64_t count;
  int64_t length;
  bool wide_loads;
};

struct SoftmaxCall {
  Tensor x;  // the axis is the last dimension
  SoftmaxRows rows;
};

struct SoftmaxSpecialisation {
  Element element;
  int row_simdgroups;
  int threadgroup_rows;
  bool wide_loads;

  int threads() const { return kSimdgroupThreads * row_simdgroups * threadgroup_rows; }
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

// True if rows are contiguous and 16-byte aligned.
bool wide_rows(const Tensor& tensor) {
  return tensor.stride(tensor.dim() - 1) == 1 && rows_aligned_16(tensor);
}

Element check_operand(ArgumentName name, const Tensor& tensor) {
  check_device(name, tensor);
  check_storage(name, tensor);
  return check_element(name, tensor);
}

// Messages show the shape of `original`.
SoftmaxRows check_rows(ArgumentName name, const Tensor& tensor, const Tensor& original,
                       Element element) {
  SoftmaxRows rows{element, 1, tensor.size(tensor.dim() - 1), false};
  bool empty = rows.length == 0;
  bool countable = true;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    empty = empty || tensor.size(dim) == 0;
    countable = countable && !__builtin_mul_overflow(rows.count, tensor.size(dim), &rows.count);
  }
  check(empty || (countable && rows.count <= kMaxLength), name, " has shape ", shape_text(original),
        "; it may have at most ", kMaxLength, " rows of ", rows.length, " values");
  rows.count = empty ? 0 : rows.count;
  rows.wide_loads = wide_rows(tensor);
  return rows;
}

// x with the axis as its last dimension. A scalar becomes a row of length 1.
Tensor axis_last(const Tensor& x, int64_t dim) {
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  check(dim >= -rank && dim < rank, "`dim` is ", dim, "; `x` has ", Counted{x.dim(), "dimension"},
        ", so it must be in ", -rank, "..", rank - 1);
  return x.dim() == 0 ? torch::stable::unsqueeze(x, 0) : torch::stable::transpose(x, dim, -1);
}

SoftmaxCall check_softmax(const Tensor& x, int64_t dim, bool in_place) {
  const Element element = check_operand("x", x);
  const Tensor last = axis_last(x, dim);
  check_length("x", last, last.dim() - 1, "length along dim");
  const SoftmaxRows rows = check_rows("x", last, x, element);
  if (in_place) { check_no_overlap("x", x); }
  return {last, rows};
}

SoftmaxRows check_causal_mask(const Tensor& scores, int64_t q_offset) {
  const Element element = check_operand("scores", scores);
  check(scores.dim() >= 2, "`scores` has ", Counted{scores.dim(), "dimension"}, ", shape ",
        shape_text(scores), "; it must have 2 or more: (..., q_length, kv_length)");
  check_offset("q_offset", q_offset);
  check_length("scores", scores, scores.dim() - 2, "q_length");
  check_length("scores", scores, scores.dim() - 1, "kv_length");
  const SoftmaxRows rows = check_rows("scores", scores, scores, element);
  check_no_overlap("scores", scores);
  return rows;
}

// Rows of up to this many values have one SIMD group: a barrier would cost more than it saves.
constexpr int64_t kShortRow = 1024;
// SIMD groups of a threadgroup that has several short rows or one longer row.
constexpr int kUsualSimdgroups = 8;
// From this length on a row has 1024 threads, Metal's most, and each thread at least 16 values.
constexpr int64_t kLongRow = 16384;
constexpr int kMaxSimdgroups = 32;

// Metal counts the threads of each dimension in 32 bits, and a threadgroup has up to 1024.
constexpr int64_t kMaxGroupsAcross = 4096;

SoftmaxSpecialisation choose_softmax(const SoftmaxRows& rows) {
  if (rows.length <= kShortRow) { return {rows.element, 1, kUsualSimdgroups, rows.wide_loads}; }
  return {rows.element, rows.length < kLongRow ? kUsualSimdgroups : kMaxSimdgroups, 1,
          rows.wide_loads};
}

std::array<uint32_t, 3> softmax_threadgroups(const SoftmaxRows& rows,
                                             const SoftmaxSpecialisation& s) {
  const int64_t groups = divide_up(rows.count, s.threadgroup_rows);
  const int64_t across = std::min(groups, kMaxGroupsAcross);
  const int64_t down = across == 0 ? 0 : divide_up(groups, across);
  return extent(across, down, down > 0);
}

// All dimensions of `tensor` but the last. Contiguous dimensions are joined. The innermost one is
// not joined if keep_innermost, because the kernel then needs positions along it.
RowDims row_dims(const Tensor& tensor, bool keep_innermost) {
  RowDims dims{};
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) { continue; }
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

Launch launch_of(const char* kernel, const SoftmaxRows& rows, const SoftmaxSpecialisation& s) {
  Launch launch("softmax", kernel, s.defines());
  launch.threadgroups = softmax_threadgroups(rows, s);
  launch.threads = extent(s.threads());
  return launch;
}

// out: the axis is its last dimension. If the op works in place, out is call.x.
Launch softmax_launch(const SoftmaxCall& call, const SoftmaxSpecialisation& s, const Tensor& out) {
  SoftmaxParams params{};
  params.x_rows = row_dims(call.x, false);
  params.out_rows = row_dims(out, false);
  params.x_stride = call.x.stride(call.x.dim() - 1);
  params.out_stride = out.stride(out.dim() - 1);
  params.rows = static_cast<uint32_t>(call.rows.count);
  params.length = static_cast<uint32_t>(call.rows.length);

  Launch launch = launch_of("softmax", call.rows, s);
  launch.buffers = {{SOFTMAX_X, call.x, false}, {SOFTMAX_OUT, out, true}};
  launch.set_params(SOFTMAX_PARAMS, params);
  return launch;
}

Launch causal_mask_launch(const SoftmaxRows& rows, const SoftmaxSpecialisation& s,
                          const Tensor& scores, int64_t q_offset) {
  CausalMaskParams params{};
  params.score_rows = row_dims(scores, scores.size(scores.dim() - 2) > 1);
  params.key_stride = scores.stride(scores.dim() - 1);
  params.q_offset = q_offset;
  params.rows = static_cast<uint32_t>(rows.count);
  params.q_length = static_cast<uint32_t>(scores.size(scores.dim() - 2));
  params.kv_length = static_cast<uint32_t>(rows.length);

  Launch launch = launch_of("apply_causal_mask", rows, s);
  launch.buffers = {{CAUSAL_MASK_SCORES, scores, true}};
  launch.set_params(CAUSAL_MASK_PARAMS, params);
  return launch;
}

// True if any score is masked. The first query sees the fewest keys.
bool masks(const SoftmaxRows& rows, const Tensor& scores, int64_t q_offset) {
  return rows.count > 0 && q_offset + 1 < scores.size(scores.dim() - 1);
}

void run(const Launch& launch, const SoftmaxRows& rows, const SoftmaxSpecialisation& s,
         Backend& backend) {
  note(backend, [&] {
    const std::string size = s.row_simdgroups == 1 ? " are short: each has a SIMD group"
                                                   : " are long: each has a threadgroup";
    return JsonObject()
        .add("threadgroup_bytes", s.threadgroup_bytes())
        .add("reason", "rows of " + std::to_string(rows.length) + size);
  });
  backend.run(launch);
}

void run_softmax(const SoftmaxCall& call, const Tensor& out, Backend& backend) {
  if (call.rows.count == 0) { return; }
  SoftmaxRows rows = call.rows;
  rows.wide_loads = rows.wide_loads && wide_rows(out);
  const SoftmaxSpecialisation s = choose_softmax(rows);
  run(softmax_launch(call, s, out), rows, s, backend);
}

// As in torch, a result has the layout of its argument.
Tensor new_like(const Tensor& x) {
  using torch::stable::detail::from;
  const torch::stable::Device meta(torch::headeronly::DeviceType::Meta);
  const auto device = is_recording() ? std::optional(meta) : std::nullopt;
  std::array<StableIValue, 6> stack{from(x),      from(std::nullopt), from(std::nullopt),
                                    from(device), from(std::nullopt), from(std::nullopt)};
  TORCH_CALL(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = check_softmax(x, dim, false);
  const Tensor out = new_like(x);
  run_softmax(call, axis_last(out, dim), backend);
  return out;
}

Tensor softmax_inplace(const Tensor& x, int64_t dim, Backend& backend) {
  const SoftmaxCall call = check_softmax(x, dim, true);
  run_softmax(call, call.x, backend);
  return x;
}

Tensor apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset, Backend& backend) {
  const SoftmaxRows rows = check_causal_mask(scores, q_offset);
  if (masks(rows, scores, q_offset)) {
    const SoftmaxSpecialisation s = choose_softmax(rows);
    run(causal_mask_launch(rows, s, scores, q_offset), rows, s, backend);
  }
  return scores;
}

}  // namespace metal_attn
