#include "csrc/ops/attention/tensor_check.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <vector>

#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;
using Sizes = std::array<int64_t, 4>;

// Two blocks of queries, a partial block of keys, and a diagonal off the corner.
constexpr Sizes kQueries{1, 2, 70, 64};
constexpr Sizes kKeys{1, 1, 100, 64};

Tensor allocate(int32_t device_type, int32_t dtype, const Sizes& sizes) {
  const Sizes strides{sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(4, sizes.data(), strides.data(), dtype, device_type, 0, &handle));
  return Tensor(handle);
}

Tensor host_tensor(const Sizes& sizes) {
  return allocate(aoti_torch_device_type_cpu(), aoti_torch_dtype_float32(), sizes);
}

// Numbers in -1..1 without a pattern that a swap of rows or columns would leave as it is.
Tensor filled(int32_t device_type, int32_t dtype, const Sizes& sizes, uint32_t seed) {
  Tensor host = host_tensor(sizes);
  float* values = static_cast<float*>(host.mutable_data_ptr());
  uint32_t state = seed;
  for (int64_t i = 0; i < host.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  Tensor result = allocate(device_type, dtype, sizes);
  torch::stable::copy_(result, host);
  return result;
}

std::vector<float> values_of(const Tensor& tensor) {
  Tensor host = host_tensor(kQueries);
  torch::stable::copy_(host, tensor);
  const float* values = static_cast<const float*>(host.const_data_ptr());
  return {values, values + host.numel()};
}

}  // namespace

std::string compare_kinds_of_tile(Backend& backend, int32_t device_type) {
  struct Kind {
    const char* name;
    int32_t dtype;
    float bound;
  };
  // Values are at most 1: each result is rounded, and weights are cut to 11 bits.
  const std::array<Kind, 2> kinds{{{"float16", aoti_torch_dtype_float16(), 0x1p-9f},
                                   {"bfloat16", aoti_torch_dtype_bfloat16(), 0x1p-7f}}};
  for (const Kind& kind : kinds) {
    FlashFwdOptions options{};
    options.softmax_scale = 1.0;
    options.causal = true;
    options.window_size_left = -1;
    options.window_size_right = -1;
    const FlashFwdArguments a{filled(device_type, kind.dtype, kQueries, 1),
                              filled(device_type, kind.dtype, kKeys, 2),
                              filled(device_type, kind.dtype, kKeys, 3),
                              std::nullopt,
                              options,
                              {}};
    const auto tensor_tiles = values_of(std::get<0>(flash_fwd(a, backend, true)));
    const auto matrix_tiles = values_of(std::get<0>(flash_fwd(a, backend, false)));
    for (std::size_t i = 0; i < matrix_tiles.size(); ++i) {
      const float difference = std::fabs(tensor_tiles[i] - matrix_tiles[i]);
      if (!(difference <= kind.bound)) {
        std::ostringstream text;
        text << "a small problem in " << kind.name << " gave " << tensor_tiles[i]
             << " with tensor tiles and " << matrix_tiles[i] << " with 8x8 tiles";
        return text.str();
      }
    }
  }
  return "";
}

}  // namespace metal_attn
