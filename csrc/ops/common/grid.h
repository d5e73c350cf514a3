// How the threads of a launch are counted.
#pragma once

#include <array>
#include <cstdint>

namespace metal_attn {

inline constexpr int kSimdgroupThreads = 32;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Grid {
  std::array<uint32_t, 3> threadgroups;
  std::array<uint32_t, 3> threads;  // per threadgroup
};

}  // namespace metal_attn
