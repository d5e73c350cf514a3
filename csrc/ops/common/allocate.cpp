#include "csrc/ops/common/allocate.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <numeric>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/runtime/fresh.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

int32_t shim_dtype(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

// Adds the tensor's shape and device to torch's message.
[[noreturn]] void no_memory(const Tensor& like, const Dims& sizes, const void* failed) {
  throw std::runtime_error("metal_attn: allocating a tensor of shape " + list_text(sizes) + " on " +
                           device_text(like).str() + " failed: " + torch_error_text(failed));
}

#ifdef TORCH_METAL_ATTN_FAKE_MPS
// In tests/runtime/fake_mps, CPU tensors represent tensors on mps.
bool in_simulator(const Tensor&) { return false; }
#else
bool in_simulator(const Tensor& like) { return like.is_cpu(); }
#endif

// On the CPU only the dispatcher respects torch's deterministic mode.
Tensor dispatched(const Tensor& like, const Dims& sizes, const Dims& strides, ScalarType dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(like),
                                    from(IntHeaderOnlyArrayRef(sizes)),
                                    from(IntHeaderOnlyArrayRef(strides)),
                                    from(std::optional<ScalarType>(dtype)),
                                    from(std::optional<torch::headeronly::Layout>()),
                                    from(std::optional<torch::stable::Device>()),
                                    from(std::optional<bool>())};
  if (torch_call_dispatcher("aten::new_empty_strided", "", stack.data(), TORCH_ABI_VERSION) !=
      AOTI_TORCH_SUCCESS) {
    no_memory(like, sizes, reinterpret_cast<void*>(&torch_call_dispatcher));
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Dims sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

Dims lse_sizes(const Tensor& rows) {
  const auto sizes = rows.sizes();
  return rows.dim() == 3 ? Dims{sizes[1], sizes[0]} : Dims{sizes[0], sizes[1], sizes[2]};
}

Dims strides_like(const Tensor& like, const Dims& sizes) {
  const auto like_strides = like.strides();
  const auto step = [&](int64_t dim) {
    const int64_t stride = like_strides[static_cast<std::size_t>(dim)];
    return stride == 0 ? std::numeric_limits<int64_t>::max() : stride;
  };
  Dims order(sizes.begin(), sizes.end() - 1);  // outermost first
  std::iota(order.begin(), order.end(), int64_t{0});
  // If steps are equal, the first dimension is outermost.
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return step(a) != step(b) ? step(a) > step(b) : a < b; });
  Dims strides = sizes;
  strides.back() = 1;
  int64_t stride = sizes.back();
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto dim = static_cast<std::size_t>(order[i]);
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

Tensor swapped(const Tensor& tensor, int64_t one, int64_t other) {
  Dims sizes = sizes_of(tensor);
  const auto old_strides = tensor.strides();
  Dims strides(old_strides.begin(), old_strides.end());
  std::swap(sizes[static_cast<std::size_t>(one)], sizes[static_cast<std::size_t>(other)]);
  std::swap(strides[static_cast<std::size_t>(one)], strides[static_cast<std::size_t>(other)]);
  AtenTensorHandle view = nullptr;
  TORCH_CALL(aoti_torch__reinterpret_tensor(tensor.get(), tensor.dim(), sizes.data(),
                                            strides.data(), 0, &view));
  return Tensor(view);
}

Tensor new_empty_strided(const Tensor& like, const Dims& sizes, const Dims& strides,
                         ScalarType dtype) {
  if (!is_recording() && in_simulator(like)) {
    Tensor tensor = dispatched(like, sizes, strides, dtype);
    remember_fresh(tensor);
    return tensor;
  }
  int32_t device = 0;
  int32_t index = 0;
  if (is_recording()) {
    device = aoti_torch_device_type_meta();
  } else {
    TORCH_CALL(aoti_torch_get_device_type(like.get(), &device));
    TORCH_CALL(aoti_torch_get_device_index(like.get(), &index));
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               shim_dtype(dtype), device, index, &handle) != AOTI_TORCH_SUCCESS) {
    no_memory(like, sizes, reinterpret_cast<void*>(&aoti_torch_empty_strided));
  }
  return Tensor(handle);
}

Tensor new_empty(const Tensor& like, const Dims& sizes, ScalarType dtype) {
  Dims strides = sizes;
  int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return new_empty_strided(like, sizes, strides, dtype);
}

Tensor new_zeros(const Tensor& like, const Dims& sizes, ScalarType dtype) {
  return is_recording() ? new_empty(like, sizes, dtype)
                        : torch::stable::new_zeros(like, IntHeaderOnlyArrayRef(sizes), dtype);
}

Tensor new_empty_like(const Tensor& like) {
  const Dims sizes = sizes_of(like);
  return new_empty_strided(like, sizes, strides_like(like, sizes), like.scalar_type());
}

}  // namespace metal_attn
