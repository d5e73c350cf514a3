#include "csrc/ops/allocate.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>

#include "csrc/runtime/torch_call.h"

namespace metal_attn {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::vector<int64_t> strides_like(const Tensor& like, const std::vector<int64_t>& sizes) {
  const auto step = [&like](std::size_t dim) {
    const int64_t stride = like.stride(static_cast<int64_t>(dim));
    return stride == 0 ? std::numeric_limits<int64_t>::max() : stride;
  };
  std::vector<std::size_t> order(sizes.size() - 1);  // outermost first
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return step(a) > step(b); });
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t stride = sizes.back();
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

Tensor new_empty_strided(const Tensor& like, const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& strides) {
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(like),
                                    from(IntHeaderOnlyArrayRef(sizes)),
                                    from(IntHeaderOnlyArrayRef(strides)),
                                    from(std::optional<ScalarType>()),
                                    from(std::optional<torch::headeronly::Layout>()),
                                    from(std::optional<torch::stable::Device>()),
                                    from(std::optional<bool>())};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::new_empty_strided", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace metal_attn
