// Whether tensors share memory: what an op that writes in place must know.
#pragma once

#include <initializer_list>
#include <optional>
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

// Some two elements may lie in one place. True for a few odd layouts where none do: each stride
// must step over everything that the smaller ones span.
bool may_overlap_itself(const Tensor& tensor);

// No two may, in what is written in place.
void check_no_overlap(ArgumentName name, const Tensor& tensor);

// Some element of `a` may lie where one of `b` does, neither overlapping itself. False for parts of
// one packed tensor, as the q and k of a joint projection are; true for a few odd layouts beyond.
bool may_overlap(const Tensor& a, const Tensor& b);

// The spans from first to last byte of the two have a byte in common.
bool spans_overlap(const Tensor& a, const Tensor& b);

// What an op writes in place has an element a place, shares none with `read`, and no byte of its
// spans with `read_anywhere`, whose rows are not those of what is written.
void check_written(const std::vector<Named>& written, const std::vector<Named>& read,
                   const std::vector<Named>& read_anywhere);

}  // namespace metal_attn
