#include "csrc/ops/cache/check_copy_pages.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/overlap.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_pages(ArgumentName name, const Tensor& pages, const Tensor& cache) {
  check_device(name, pages);
  check_same_device(name, pages, "cache", cache);
  check_known_dtype(name, pages, "int32 or int64");
  const ScalarType dtype = pages.scalar_type();
  check(dtype == ScalarType::Int || dtype == ScalarType::Long, name, " has dtype ",
        dtype_text(pages), "; it must be int32 or int64");
  check_rank(name, pages, 1, "(copies)");
  check_length(name, pages, 0, "length");
  check_storage(name, pages);
  check(!spans_overlap(pages, cache), name,
        " lies in the memory of `cache`, which is written; call ", name, ".clone() first");
}

// The numbers, where the host can read them.
std::vector<int64_t> page_numbers(ArgumentName name, const Tensor& pages, int64_t count) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < pages.size(0); ++i) {
    const int64_t at = i * pages.stride(0);
    const void* data = pages.const_data_ptr();
    numbers.push_back(pages.scalar_type() == ScalarType::Long
                          ? static_cast<const int64_t*>(data)[at]
                          : static_cast<const int32_t*>(data)[at]);
    check(numbers.back() >= 0 && numbers.back() < count, name, "[", i, "] is ", numbers.back(),
          "; it must be in 0..", count - 1, ", the pages of `cache`");
  }
  return numbers;
}

void check_order_does_not_matter(const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
  std::unordered_map<int64_t, std::size_t> written;
  for (std::size_t i = 0; i < dst.size(); ++i) {
    const auto [at, first] = written.emplace(dst[i], i);
    check(first, "`dst`[", i, "] is ", dst[i], ", and so is `dst`[", at->second,
          "]; no page may be written twice");
  }
  for (std::size_t i = 0; i < src.size(); ++i) {
    const auto at = written.find(src[i]);
    check(at == written.end(), "`src`[", i, "] is ", src[i], ", and so is `dst`[",
          at == written.end() ? 0 : at->second, "]; no page that is read may be written");
  }
}

}  // namespace

void check_copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  check_device("cache", cache);
  check(cache.dim() >= 1, "`cache` has no dimensions; it must be (pages, ...)");
  check_storage("cache", cache);
  check(!may_overlap_itself(cache), "`cache` has shape ", shape_text(cache), " and strides ",
        stride_text(cache), ": elements may share memory, so it cannot be written in place");
  check_pages("src", src, cache);
  check_pages("dst", dst, cache);
  check_same_dtype("dst", dst, "src", src);
  check_shape("dst", dst, {{src.size(0)}});
  if (cache.is_cpu()) {
    check_order_does_not_matter(page_numbers("src", src, cache.size(0)),
                                page_numbers("dst", dst, cache.size(0)));
  }
}

}  // namespace metal_attn
