#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/tensor_tiles.h"
#include "csrc/runtime/compile_error.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

using Sizes = std::array<int64_t, 4>;

Tensor allocate(int32_t device_type, int32_t dtype, const Sizes& sizes) {
  const Sizes strides{sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  AtenTensorHandle handle = nullptr;
  TORCH_CALL(
      aoti_torch_empty_strided(4, sizes.data(), strides.data(), dtype, device_type, 0, &handle));
  return Tensor(handle);
}

Tensor host_tensor(const Sizes& sizes) {
  return allocate(aoti_torch_device_type_cpu(), aoti_torch_dtype_float32(), sizes);
}

// Pseudo-random numbers in -1..1, so that a swap of rows or columns changes results.
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
  Tensor host = host_tensor({tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)});
  torch::stable::copy_(host, tensor);
  const float* values = static_cast<const float*>(host.const_data_ptr());
  return {values, values + host.numel()};
}

// Two blocks of queries, a partial block of keys, and a diagonal that does not end in a corner.
struct Problem {
  const char* name;
  int32_t dtype;
  float rounding;  // of results or operands, whichever is coarser
  int64_t head_dim;
  Sizes queries() const { return {1, 2, 70, head_dim}; }
  Sizes keys() const { return {1, 1, 100, head_dim}; }
};

// The problems cover every dtype, and tiles of many columns. With such tiles, two SIMD groups of
// both backward kernels share rows and exchange partial sums of scores, and dk and dv have slices.
std::vector<Problem> problems(bool float32) {
  if (float32) {
    return {{"float32", aoti_torch_dtype_float32(), 0x1p-11f, 64},
            {"float32 with a head dim of 192", aoti_torch_dtype_float32(), 0x1p-11f, 192}};
  }
  return {{"float16", aoti_torch_dtype_float16(), 0x1p-11f, 64},
          {"bfloat16", aoti_torch_dtype_bfloat16(), 0x1p-8f, 64},
          {"float16 with a head dim of 192", aoti_torch_dtype_float16(), 0x1p-11f, 192}};
}

FlashFwdArguments forward_of(const Problem& problem, int32_t device_type) {
  const auto operand = [&](const Sizes& sizes, uint32_t seed) {
    return filled(device_type, problem.dtype, sizes, seed);
  };
  return {operand(problem.queries(), 1),
          operand(problem.keys(), 2),
          operand(problem.keys(), 3),
          std::nullopt,
          {.softmax_scale = 1.0, .causal = true},
          {}};
}

// "", or a line if results differ by more than `roundings` times the largest value (at least 1).
std::string difference(const char* problem, const char* name, const Tensor& tensor_tiles,
                       const Tensor& matrix_tiles, float roundings) {
  const auto actual = values_of(tensor_tiles);
  const auto expected = values_of(matrix_tiles);
  float largest = 1.0f;
  for (const float value : expected) { largest = std::max(largest, std::fabs(value)); }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!(std::fabs(actual[i] - expected[i]) <= roundings * largest)) {
      return text_of("in a small problem in ", problem, ", ", name, " was ", actual[i],
                     " with tensor tiles and ", expected[i], " with 8x8 tiles");
    }
  }
  return "";
}

}  // namespace

std::string compare_tiles(Backend& backend, int32_t device_type, Pass pass, bool float32) {
  for (const Problem& problem : problems(float32)) {
    const FlashFwdArguments f = forward_of(problem, device_type);
    const auto compare = [&](const char* name, const Tensor& actual, const Tensor& expected,
                             float roundings) {
      return difference(problem.name, name, actual, expected, roundings * problem.rounding);
    };
    std::string different;
    if (pass == Pass::kForward) {
      const auto [actual, actual_lse] = flash_fwd(f, backend, true);
      const auto [expected, expected_lse] = flash_fwd(f, backend, false);
      // The bound is 4 roundings: results are rounded, and weights are truncated.
      different = compare("out", actual, expected, 4);
    } else {
      const auto [out, lse] = flash_fwd(f, backend, false);
      const FlashBwdArguments a{filled(device_type, problem.dtype, problem.queries(), 4),
                                std::nullopt,
                                out,
                                lse,
                                true,
                                f};
      const auto [dq, dk, dv, delta, normalisers] = flash_bwd(a, backend, true);
      const auto [expected_dq, expected_dk, expected_dv, unused1, unused2] =
          flash_bwd(a, backend, false);
      // The bound is 8 roundings: results and the terms of their sums are rounded, and sums of
      // terms of both signs are smaller than the terms.
      for (const auto& [name, actual, expected] : {std::tuple{"dq", &dq, &expected_dq},
                                                   {"dk", &dk, &expected_dk},
                                                   {"dv", &dv, &expected_dv}}) {
        different = different.empty() ? compare(name, *actual, *expected, 8) : different;
      }
    }
    if (!different.empty()) { return different; }
  }
  return "";
}

}  // namespace metal_attn
