#include "csrc/ops/common/overlap.h"

namespace metal_attn {
namespace {

struct Dimension {
  int64_t stride;
  int64_t size;
  int64_t other_size;
};

// The bytes of a tensor, counted from `base`. On the CPU storages may overlap, so the base is
// address 0. On mps the base is the buffer, whose handle is not an address.
struct Span {
  uintptr_t base;
  int64_t first;
  int64_t end;  // one past the last byte
};

Span span_of(const Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  const uintptr_t data = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const int64_t offset = tensor.storage_offset() * bytes;
  Span span{};
  span.base = tensor.is_cpu() ? 0 : data - static_cast<uintptr_t>(offset);
  span.first = tensor.is_cpu() ? static_cast<int64_t>(data) : offset;
  span.end = span.first + (last_position(tensor) + 1) * bytes;
  return span;
}

// True if every stride exceeds the span of the smaller strides.
bool nested(std::vector<Dimension> dims) {
  std::sort(dims.begin(), dims.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  for (const Dimension& dim : dims) {
    if (dim.stride <= reach) { return false; }
    reach += (dim.size - 1) * dim.stride;
  }
  return true;
}

}  // namespace

bool may_overlap_itself(const Tensor& tensor) {
  if (tensor.numel() == 0) { return false; }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<Dimension> dims;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 1) { dims.push_back({strides[dim], sizes[dim], 0}); }
  }
  return !nested(std::move(dims));
}

void check_no_overlap(ArgumentName name, const Tensor& tensor) {
  check(!may_overlap_itself(tensor), name, " has shape ", shape_text(tensor), " and strides ",
        stride_text(tensor), "; it cannot be written, as elements may share memory: call ", name,
        ".clone() first");
}

bool spans_overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || is_meta(a)) { return false; }
  const Span first = span_of(a);
  const Span second = span_of(b);
  return first.base == second.base && first.first < second.end && second.first < first.end;
}

bool may_overlap(const Tensor& a, const Tensor& b) {
  if (!spans_overlap(a, b)) { return false; }
  const bool in_order = span_of(a).first <= span_of(b).first;
  const Tensor& low = in_order ? a : b;
  const Tensor& high = in_order ? b : a;
  const int64_t bytes = static_cast<int64_t>(low.element_size());
  const int64_t difference = span_of(high).first - span_of(low).first;
  if (a.element_size() != b.element_size() || difference % bytes != 0 || low.dim() != high.dim()) {
    return true;
  }

  // Both tensors have these strides, so they share an element if
  // sum(low_index * stride) = shift + sum(high_index * stride). They share none if
  // - the strides up to `shift` reach less than `shift` in the low tensor, and
  // - every larger stride exceeds the reach of the smaller strides and `shift` together.
  const int64_t shift = difference / bytes;
  std::vector<Dimension> dims;
  for (int64_t dim = 0; dim < low.dim(); ++dim) {
    const int64_t low_size = low.size(dim);
    const int64_t high_size = high.size(dim);
    if (low_size > 1 && high_size > 1 && low.stride(dim) != high.stride(dim)) { return true; }
    if (low_size > 1 || high_size > 1) {
      dims.push_back({low_size > 1 ? low.stride(dim) : high.stride(dim), low_size, high_size});
    }
  }
  int64_t low_reach = 0;
  int64_t high_reach = 0;
  std::vector<Dimension> larger;
  for (const Dimension& dim : dims) {
    if (dim.stride <= shift) {
      low_reach += (dim.size - 1) * dim.stride;
      high_reach += (dim.other_size - 1) * dim.stride;
    } else {
      larger.push_back({dim.stride, std::max(dim.size, dim.other_size), 0});
    }
  }
  if (shift <= low_reach) { return true; }
  larger.push_back({1, shift + high_reach + 1, 0});
  return !nested(larger);
}

std::vector<Named> present(
    std::initializer_list<std::pair<ArgumentName, const OptionalTensor*>> all) {
  std::vector<Named> result;
  for (const auto& [name, tensor] : all) {
    if (tensor->has_value()) { result.push_back({name, &**tensor}); }
  }
  return result;
}

void check_written(const std::vector<Named>& written, const std::vector<Named>& read,
                   const std::vector<Named>& read_anywhere) {
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto& [name, tensor] = written[i];
    check_no_overlap(name, *tensor);
    for (std::size_t j = 0; j < i; ++j) {
      check(!may_overlap(*tensor, *written[j].tensor), name, " may share elements with ",
            written[j].name, ", and both are written");
    }
    for (const Named& source : read) {
      check(!may_overlap(*source.tensor, *tensor), source.name, " may share elements with ", name,
            ", which is written in place; call ", source.name, ".clone() first");
    }
    for (const Named& source : read_anywhere) {
      check(!spans_overlap(*source.tensor, *tensor), source.name, " overlaps the memory of ", name,
            ", which is written in place; call ", source.name, ".clone() first");
    }
  }
}

}  // namespace metal_attn
