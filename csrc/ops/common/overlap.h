// Checks for ops that write in place: tensors must not share memory.
#pragma once

#include <utility>
#include <vector>

#include "csrc/ops/common/check.h"

namespace metal_attn {

struct Named {
  ArgumentName name;
  const Tensor* tensor;
};

// The optional tensors that have a value.
std::vector<Named> present(
    std::initializer_list<std::pair<ArgumentName, const OptionalTensor*>> all);

// True unless each stride exceeds the span of the smaller strides, so that no two elements share
// memory. Also true for a few odd layouts whose elements do not share memory.
bool may_overlap_itself(const Tensor& tensor);

void check_no_overlap(ArgumentName name, const Tensor& tensor);

// True if `a` and `b` may share an element, and for a few odd layouts that share none. Requires
// that neither overlaps itself. False for parts of a packed tensor, such as joint q and k.
bool may_overlap(const Tensor& a, const Tensor& b);

// True if the ranges from the first to the last byte overlap.
bool spans_overlap(const Tensor& a, const Tensor& b);

// Checks that written tensors do not overlap themselves, each other or `read`, and that their
// ranges of bytes do not overlap those of `read_anywhere`.
void check_written(const std::vector<Named>& written, const std::vector<Named>& read,
                   const std::vector<Named>& read_anywhere);

}  // namespace metal_attn
