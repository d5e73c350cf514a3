#include "csrc/ops/softmax/check.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/overlap.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

Element check_operand(ArgumentName name, const Tensor& tensor) {
  check_device(name, tensor);
  return check_element(name, tensor);
}

// `tensor` has its rows along the last dimension already; messages are about `given`.
SoftmaxRows check_rows(ArgumentName name, const Tensor& tensor, const Tensor& given,
                       Element element) {
  SoftmaxRows rows{element, 1, tensor.size(tensor.dim() - 1), false};
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

void check_no_overlap(ArgumentName name, const Tensor& tensor) {
  check(!may_overlap_itself(tensor), name, " has shape ", shape_text(tensor), " and strides ",
        stride_text(tensor), "; written in place, no two elements may share memory: call ", name,
        ".clone() first");
}

}  // namespace

bool wide_rows(const Tensor& tensor) {
  return tensor.stride(tensor.dim() - 1) == 1 && rows_aligned_16(tensor);
}

Tensor axis_last(const Tensor& x, int64_t dim) {
  const int64_t rank = std::max<int64_t>(x.dim(), 1);
  check(dim >= -rank && dim < rank, "`dim` is ", dim, "; `x` has ", x.dim(),
        " dimensions, so it must be in ", -rank, "..", rank - 1);
  return x.dim() == 0 ? torch::stable::unsqueeze(x, 0) : torch::stable::transpose(x, dim, -1);
}

SoftmaxCall check_softmax(const Tensor& x, int64_t dim, bool in_place) {
  const Element element = check_operand("x", x);
  const Tensor last = axis_last(x, dim);
  check_length("x", last, last.dim() - 1, "length along dim");
  const SoftmaxRows rows = check_rows("x", last, x, element);
  if (in_place) {
    check_no_overlap("x", x);
  }
  return {last, rows};
}

SoftmaxRows check_causal_mask(const Tensor& scores, int64_t q_offset) {
  const Element element = check_operand("scores", scores);
  check(scores.dim() >= 2, "`scores` has ", scores.dim(), " dimensions, shape ", shape_text(scores),
        "; it must have 2 or more: (..., q_length, kv_length)");
  check(q_offset >= -kMaxLength && q_offset <= kMaxLength, "`q_offset` is ", q_offset,
        "; it must be in ", -kMaxLength, "..", kMaxLength);
  check_length("scores", scores, scores.dim() - 2, "q_length");
  check_length("scores", scores, scores.dim() - 1, "kv_length");
  const SoftmaxRows rows = check_rows("scores", scores, scores, element);
  check_no_overlap("scores", scores);
  return rows;
}

}  // namespace metal_attn
