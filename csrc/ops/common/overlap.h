// Checks of ops that write in place: tensors must not share memory.
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

// True if two elements may share memory, and for a few odd layouts in which none do: each stride
// must step over everything that the smaller ones span.
bool may_overlap_itself(const Tensor& tensor);

// Refuses a tensor that is written in place and may overlap itself.
void check_no_overlap(ArgumentName name, const Tensor& tensor);

// True if `a` and `b` may share an element, and for a few odd layouts that do not. Neither may
// overlap itself. False for parts of one packed tensor, such as q and k of a joint projection.
bool may_overlap(const Tensor& a, const Tensor& b);

// True if the spans from the first to the last byte have a byte in common.
bool spans_overlap(const Tensor& a, const Tensor& b);

// Written tensors have one element a place and share none with `read`. Their spans share no byte
// with `read_anywhere`, whose rows are not those of the written tensor.
void check_written(const std::vector<Named>& written, const std::vector<Named>& read,
                   const std::vector<Named>& read_anywhere);

}  // namespace metal_attn
