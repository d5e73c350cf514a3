// One dispatch of a kernel, as plain data: what the ops build and the backends run.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace metal_attn {

// torch_mps_set_arg_bytes and Metal's setBytes both stop at 4 KiB.
inline constexpr std::size_t kMaxParamsBytes = 4096;

struct Define {
  std::string name;
  std::string value;
};

struct BufferArgument {
  uint32_t slot;  // [[buffer(slot)]]
  torch::stable::Tensor tensor;
  bool writable;
};

struct Launch {
  std::string family;  // shaders/<family>.metal
  std::string kernel;
  std::vector<Define> defines;  // the specialisation, in the order in which it is written
  std::vector<BufferArgument> buffers;
  uint32_t params_slot = 0;
  std::vector<std::byte> params;
  std::array<uint32_t, 3> threadgroups{};
  std::array<uint32_t, 3> threads{};  // per threadgroup
};

template <typename Params>
std::vector<std::byte> params_bytes(const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= kMaxParamsBytes);
  std::vector<std::byte> bytes(sizeof(Params));
  std::memcpy(bytes.data(), &params, sizeof(Params));
  return bytes;
}

}  // namespace metal_attn
