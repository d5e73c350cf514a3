#include "csrc/ops/merge/check.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/overlap.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows of `columns` columns, counted through batch, head and row of a head.
MergeShape merge_shape(ArgumentName name, const Tensor& tensor, int64_t batch, int64_t heads,
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

void check_state(ArgumentName name, const Tensor& out, ArgumentName lse_name, const Tensor& lse) {
  check_last_stride(name, out);
  check_storage(name, out);
  const bool packed = out.dim() == 3;
  check_statistics(
      lse_name, lse, name, out,
      packed ? Dims{out.size(1), out.size(0)} : Dims{out.size(0), out.size(1), out.size(2)});
}

MergeProblem check_operands(const MergeStateArguments& a) {
  MergeProblem p{};
  const Tensor& out = a.out_a;
  check_device("out_a", out);
  p.element = check_element("out_a", out);
  const int64_t rank = out.dim();
  check(rank == 3 || rank == 4, "`out_a` has ", rank, " dimensions, shape ", shape_text(out),
        "; it must have 4, (batch, heads, length, head_dim), or 3, (tokens, heads, head_dim)");
  const bool packed = rank == 3;
  const int columns = check_head_dim("out_a", out.size(rank - 1), kMaxHeadDimV);
  p.shape = packed ? merge_shape("out_a", out, 1, out.size(1), out.size(0), columns)
                   : merge_shape("out_a", out, out.size(0), out.size(1), out.size(2), columns);
  check_state("out_a", out, "lse_a", a.lse_a);
  check_device("out_b", a.out_b);
  check_same_device("out_b", a.out_b, "out_a", out);
  check_same_dtype("out_b", a.out_b, "out_a", out);
  check_shape("out_b", a.out_b, {out.sizes()});
  check_state("out_b", a.out_b, "lse_b", a.lse_b);
  p.out_dtype = out.scalar_type();
  p.infinity_is_empty = a.infinity_is_empty;
  return p;
}

void check_mask(const Tensor& mask, const Tensor& out) {
  check_same_device("mask", mask, "out_a", out);
  check_known_dtype("mask", mask, "bool");
  check(mask.scalar_type() == ScalarType::Bool, "`mask` has dtype ", dtype_text(mask),
        "; it must be bool");
  check_shape("mask", mask, {out.dim() == 3 ? Dims{out.size(0)} : Dims{out.size(0), out.size(2)}});
  check_storage("mask", mask);
}

// What the result is written into.
void check_written(const MergeStateArguments& a, const std::optional<Tensor>& mask) {
  std::vector<std::pair<ArgumentName, const Tensor*>> tensors{
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

void check_partial(ArgumentName name, const Tensor& tensor) {
  check(tensor.is_contiguous(), name, " has strides ", stride_text(tensor),
        "; it must be contiguous: call ", name, ".contiguous() first");
}

}  // namespace

MergeProblem check_merge_state(const MergeStateArguments& a, bool inplace,
                               const std::optional<Tensor>& mask) {
  MergeProblem p = check_operands(a);
  check(inplace || !mask, "`mask` is given; only merge_state_ has one");
  if (mask) {
    check_mask(*mask, a.out_a);
  }
  if (inplace) {
    check_written(a, mask);
  }
  p.in_place = inplace;
  p.some_rows = mask.has_value();
  return p;
}

MergeProblem check_merge_splits(const MergeSplitsArguments& a) {
  MergeProblem p{};
  const Tensor& partial_out = a.partial_out;
  check_device("partial_out", partial_out);
  check_rank("partial_out", partial_out, 5, "(batch, heads, length, splits, head_dim)");
  const auto sizes = partial_out.sizes();
  check_statistics("partial_out", partial_out, "partial_out", partial_out, sizes);
  check_partial("partial_out", partial_out);
  const int columns = check_head_dim("partial_out", sizes[4], kMaxHeadDimV);
  check(sizes[3] >= 1 && sizes[3] <= kMaxSplits, "`partial_out` has ", sizes[3],
        " splits; there must be 1 to ", kMaxSplits);
  p.shape = merge_shape("partial_out", partial_out, sizes[0], sizes[1], sizes[2], columns);
  check_statistics("partial_lse", a.partial_lse, "partial_out", partial_out,
                   {sizes.data(), sizes.size() - 1});
  check_partial("partial_lse", a.partial_lse);

  p.out_dtype = a.out_dtype.value_or(ScalarType::Float);
  p.element = check_element("out_dtype", p.out_dtype);
  if (a.learnable_sink) {
    p.sink = check_sink(*a.learnable_sink, sizes[1], "partial_out", partial_out);
  }
  p.infinity_is_empty = a.infinity_is_empty;
  return p;
}

}  // namespace metal_attn
